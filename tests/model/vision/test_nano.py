"""nanoVLM's own checkpoints against a statement of its published source, in each version of its layout."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.architectures.registry import load_model
from model.config import read_config
from model.decoder import Decoder
from model.errors import CheckpointError
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.vision.inputs import ImageInputs
from model.settings import ModelSettings
from model.weights import Checkpoint
from rpc.frontend.prepare import load_preparer
from scheduler.invalid import InvalidRequest
from scheduler.prompts import Chat, ChatMessage, ImageHere
from scheduler.spec import Spec
from tests.model.vision import forward, nano
from tests.model.vision.conftest import features_of_a_tile, load_decoder, load_inputs
from tests.model.vision.pictures import encoded, picture
from tests.model.vision.test_chat import LIMITS
from tests.model.vision.test_encoders import near

pytestmark = pytest.mark.sample(3)

SIZES = ((32, 32), (50, 90), (90, 50), (20, 300), (200, 180), (5, 7))
WITH_TOKEN = [name for name in nano.VERSIONS if name != "plain"]
TILED = [name for name in WITH_TOKEN if name != "square"]

Made = tuple[Path, nano.Reference, Decoder, ImageInputs]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    root, kept = tmp_path_factory.mktemp("nano"), dict[str, Made]()

    def make(version: str) -> Made:
        if version not in kept:
            directory = nano.write(root / version, nano.VERSIONS[version], seed=len(version))
            tensors = load_file(directory / "model.safetensors")
            reference = nano.Reference(nano.VERSIONS[version], tensors)
            kept[version] = directory, reference, load_decoder(directory), load_inputs(directory)
        return kept[version]

    return make


@pytest.mark.parametrize("version", nano.VERSIONS)
def test_tiles_are_those_of_its_processor(version: str, made: Callable[[str], Made]) -> None:
    """Exactly, but for the whole image beside tiles, which is rounded to whole pixel values here."""
    inputs = made(version)[3]
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        tiles, (theirs, grid) = inputs.process(image), nano.tiles(nano.VERSIONS[version], image)
        off = (torch.from_numpy(tiles.pixels) / 255 - theirs).abs().amax((1, 2, 3))
        whole = version in ("overview", "stretched") and len(theirs) > 1
        assert off[whole:].max() < 1e-6
        assert off[0] <= 0.5 / 255 + 1e-5
        assert tiles.tokens == 16 * len(theirs)
        assert version in ("plain", "square") or (tiles.rows, tiles.columns) == grid


@pytest.mark.parametrize("version", nano.VERSIONS)
def test_features_are_those_of_its_source(version: str, made: Callable[[str], Made]) -> None:
    _, reference, decoder, inputs = made(version)
    for seed, size in enumerate(SIZES[:4]):
        tiles = inputs.process(picture(*size, seed))
        theirs = reference.features(torch.from_numpy(tiles.pixels) / 255)
        assert near(forward.features_of(decoder, [tiles])[0], theirs)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("version", WITH_TOKEN)
def test_logits_are_those_of_its_source(version: str, count: int, made: Callable[[str], Made]) -> None:
    directory, reference, decoder, inputs = made(version)
    config, tokenizer = read_config(directory), load_tokenizer(directory)
    images = [picture(*SIZES[i], i) for i in range(count)]
    tiles = [inputs.process(image) for image in images]
    ids = inputs.encode("<|image|>" * count + "the cat", tiles, tokenizer)
    if version in TILED:
        grids = [nano.tiles(nano.VERSIONS[version], image)[1] for image in images]
        assert ids == tokenizer.encode(nano.image_string(nano.VERSIONS[version], grids) + "the cat", True)
    x = reference.embedded(ids)
    x[torch.tensor(ids) == reference.c["lm_base_vocab_size"]] = torch.cat(
        [reference.features(torch.from_numpy(t.pixels) / 255) for t in tiles]
    )
    theirs, ours = reference.logits(x), forward.logits(decoder, config, ids, tiles)
    assert near(ours, theirs, 1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_the_first_version_has_its_image_before_the_text(made: Callable[[str], Made]) -> None:
    directory, reference, decoder, inputs = made("plain")
    config, tokenizer, tiles = read_config(directory), load_tokenizer(directory), [inputs.process(picture(50, 70))]
    text = "Question: the cat? Answer:"
    ids = inputs.encode(text, tiles, tokenizer)
    assert ids == inputs.encode(f"<image>{text}", tiles, tokenizer)
    features = reference.features(torch.from_numpy(tiles[0].pixels) / 255)
    theirs = reference.logits(torch.cat([features, reference.embedded(tokenizer.encode(text, True))]))
    assert near(forward.logits(decoder, config, ids, tiles), theirs, 1e-4)
    with pytest.raises(InvalidRequest, match="2 images"):
        inputs.encode(text, tiles * 2, tokenizer)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("version", nano.VERSIONS)
def test_conversations_are_those_of_its_source(version: str, count: int, tmp_path: Path) -> None:
    """The source puts the placeholders of images before the text of a message, in one string."""
    count = 1 if version == "plain" else count
    directory, images = nano.write(tmp_path, nano.VERSIONS[version]), [picture(50, 90, i) for i in range(count)]
    (directory / "chat_template.jinja").write_text(nano.TEMPLATE)
    preparer = load_preparer(ModelSettings(model=str(directory)))
    message = ChatMessage("user", (*[ImageHere()] * count, "the cat?"))
    request = preparer.prepare(Spec(Chat((message,)), tuple(map(encoded, images))), LIMITS)
    grids = [nano.tiles(nano.VERSIONS[version], image)[1] for image in images]
    before = "" if version == "plain" else "<|image|>" * 16 * count
    before = nano.image_string(nano.VERSIONS[version], grids) if version in TILED else before
    text = f"<|im_start|>user\n{before}the cat?<|im_end|>\n<|im_start|>assistant\n"
    ids = preparer.tokenizer.encode(text, True)
    assert request.prompt.tolist() == ([0] * 16 if version == "plain" else []) + ids
    preparer.close()


@pytest.mark.parametrize("version", ["plain", "overview"])
def test_chunks_change_no_bit(version: str, made: Callable[[str], Made]) -> None:
    """Each token has its own position, wherever a chunk begins."""
    directory, _, decoder, inputs = made(version)
    config, tiles = read_config(directory), [inputs.process(picture(50, 90))]
    ids = inputs.encode("<|image|>" * (version != "plain") + "the cat sat", tiles, load_tokenizer(directory))
    whole = forward.logits(decoder, config, ids, tiles)
    for chunk in (1, 7, 16):
        assert torch.equal(forward.logits(decoder, config, ids, tiles, chunk), whole)


def test_config_says_what_the_engine_needs(made: Callable[[str], Made]) -> None:
    config = read_config(made("overview")[0])
    assert config.vision is not None
    assert (config.architecture, config.context, config.eos_token_ids) == ("nanoVLM", 512, (0,))
    assert (config.heads, config.kv_heads, config.head_dim, config.layers) == (6, 2, 8, 3)
    assert (config.vision.image_token_id, config.vision.prefix_lm) == (320, False)
    assert read_config(made("square")[0]).tied_embeddings is False


@pytest.mark.parametrize(("name", "features", "eos"), [("222M", 49, (0,)), ("450M", 64, ()), ("460M-8k", 64, ())])
def test_published_configs_are_read(name: str, features: int, eos: tuple[int, ...], tmp_path: Path) -> None:
    """Beside a tokenizer that does not say how a text ends, as the first config does."""
    published = nano.PUBLISHED[name]
    version = "plain" if "vlm_extra_tokens" not in published else "overview" if "460M" in name else "split"
    directory = nano.write(tmp_path, nano.VERSIONS[version])
    (directory / "config.json").write_text(json.dumps(published))
    (directory / "tokenizer_config.json").unlink()
    config, inputs = read_config(directory), load_inputs(directory)
    assert (config.vocabulary, config.layers, config.head_dim) == (
        published["lm_vocab_size"], published["lm_n_blocks"], 64,
    )  # fmt: skip
    assert (config.context, config.eos_token_ids, features_of_a_tile(inputs)) == (8192, eos, features)
    for size in ((300, 420), (700, 520)):
        image = picture(*size)
        tiles, (theirs, _) = inputs.process(image), nano.tiles(published, image)
        assert (torch.from_numpy(tiles.pixels) / 255 - theirs).abs().max() <= 0.5 / 255 + 1e-5


def test_without_a_tokenizer_the_placeholder_follows_the_base_vocabulary(tmp_path: Path) -> None:
    for version, token in (("plain", 0), ("split", 320), ("overview", 320)):
        (tmp_path / "config.json").write_text(json.dumps(nano.VERSIONS[version]))
        config = read_config(tmp_path)
        assert config.vision is not None
        assert (config.vision.image_token_id, config.eos_token_ids) == (token, ())


@pytest.mark.parametrize("saved", ["head", "token_embedding"])
def test_tied_weights_stand_under_either_name(saved: str, tmp_path: Path) -> None:
    directory = nano.write(tmp_path, nano.PLAIN, saved=saved)
    reference = nano.Reference(nano.PLAIN, load_file(directory / "model.safetensors"))
    ids = [5, 9, 77]
    ours = forward.logits(load_decoder(directory), read_config(directory), ids)
    assert near(ours, reference.logits(reference.embedded(ids)), 1e-4)


def test_every_tensor_counts(tmp_path: Path) -> None:
    directory = nano.write(tmp_path, nano.SPLIT)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in ("MP.proj.weight", "vision_encoder.blocks.1.ln2.bias", "decoder.blocks.2.attn.k_proj.weight"):
        save_file({key: t for key, t in tensors.items() if key != name}, path)
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            load_decoder(directory)
    save_file(tensors | {"MP.proj.bias": torch.zeros(48)}, path)
    with pytest.raises(CheckpointError, match=r"MP\.proj\.bias"):
        load_model(read_config(directory), Checkpoint(directory), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vit_cls_flag": True}, "vit_cls_flag"),
        ({"mp_image_token_length": 64}, "mp_image_token_length"),
        ({"max_img_size": 100}, "max_img_size"),
        ({"mp_pixel_shuffle_factor": 3}, "do not divide"),
        ({"vlm_extra_tokens": nano.OVERVIEW["vlm_extra_tokens"] | {"image_token": "<picture>"}}, "no such token"),
        ({"vit_n_heads": 5}, "cannot have 5 heads"),
    ],
)
def test_what_does_not_fit_is_refused(changes: nano.Config, message: str, tmp_path: Path) -> None:
    directory = nano.write(tmp_path, nano.OVERVIEW)
    (directory / "config.json").write_text(json.dumps(nano.OVERVIEW | changes))
    with pytest.raises(CheckpointError, match=message):
        load_inputs(directory)


def test_more_tiles_than_names_are_refused(made: Callable[[str], Made]) -> None:
    inputs = made("overview")[3]
    tiles = inputs.process(picture(32, 32))
    wide = replace(tiles, pixels=tiles.pixels.repeat(10, 0), grid=(10, 16), rows=1, columns=9)
    with pytest.raises(InvalidRequest, match="1 x 9 tiles"):
        inputs.expand("<|image|>", [wide])
