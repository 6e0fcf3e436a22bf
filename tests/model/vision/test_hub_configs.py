"""Law: checkpoints as the Hub has them, with files that leave much unsaid and tensors under old names, are read as
transformers reads them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from model.config import read_config
from model.generation_config import read_defaults
from model.inputs.vision.registry import read_image_normalisation
from model.settings import ModelSettings
from rpc.frontend.prepare import load_preparer
from scheduler.parameters import Sampling, Stopping
from scheduler.prompts import Chat
from scheduler.settings import SchedulerSettings
from scheduler.spec import Spec
from tests.model.families.styles import edit_tensors
from tests.model.vision import checkpoints, reference
from tests.model.vision.conftest import features_of_a_tile, load_inputs
from tests.model.vision.hub import PUBLISHED, Published
from tests.model.vision.pictures import encoded, picture
from tests.model.vision.seen import NEW, greedy
from tests.model.vision.test_chat import LIMITS, messages_of
from tests.model.vision.test_styles import INSIDE, both
from tests.model.vision.test_tiles import normalised
from tests.support.engines import make_rig
from tests.support.image_chats import CONVERSATIONS

pytestmark = pytest.mark.sample(3)

each = pytest.mark.parametrize("published", PUBLISHED, ids=str)


def one_of_each(values: Callable[[Published], object]) -> pytest.MarkDecorator:
    """Takes configs that differ in what a test reads of them: SmolVLM's differ in sizes of their text models alone."""
    distinct = {json.dumps(values(published), sort_keys=True): published for published in reversed(PUBLISHED)}
    return pytest.mark.parametrize("published", list(reversed(distinct.values())), ids=str)


Made = Callable[[Published], Path]


def write(directory: Path, published: Published, config: dict[str, Any], images: dict[str, Any]) -> Path:
    """All but weights."""
    directory.mkdir(parents=True)
    files = {
        "config.json": config,
        "preprocessor_config.json": images,
        "processor_config.json": published.processor,
        "generation_config.json": published.generation,
    }
    if published.template is not None:
        files["chat_template.json"] = {"chat_template": published.template}
    checkpoints.tokenizer().save_pretrained(directory)
    for name, values in files.items():
        if values:
            (directory / name).write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Makes a directory of the checkpoint's true size, without weights."""
    root, made = tmp_path_factory.mktemp("whole"), dict[str, Path]()

    def make(published: Published) -> Path:
        if published.name not in made:
            directory = root / published.name
            made[published.name] = write(directory, published, published.config, published.images)
        return made[published.name]

    return make


def image_processor(directory: Path) -> Any:
    values = json.loads((directory / "preprocessor_config.json").read_text())
    return getattr(hf, f"{values['image_processor_type']}Pil").from_pretrained(directory)


def processor(published: Published, directory: Path) -> Any:
    """transformers' own, as its files ask for it."""
    images, tokenizer, said = image_processor(directory), checkpoints.tokenizer(), dict(published.processor)
    said.pop("processor_class", None)
    match published.config["model_type"]:
        case "paligemma":
            images.image_seq_length = features(directory)
            return hf.PaliGemmaProcessor(images, tokenizer)
        case "llava":
            return hf.LlavaProcessor(images, tokenizer, chat_template=published.template, **said)
        case _:  # SmolVLM's writes the same strings, but wants packages for videos
            made = Idefics3Processor(images, tokenizer, image_seq_len=features(directory))
            made.chat_template = published.template
            return made


def features(directory: Path) -> int:
    return features_of_a_tile(load_inputs(directory))


@each
def test_config_is_read_as_transformers_does(published: Published, whole: Made) -> None:
    directory = whole(published)
    ours, theirs = read_config(directory), hf.AutoConfig.from_pretrained(directory)
    text, tower = theirs.text_config, theirs.vision_config
    assert (ours.vocabulary, ours.hidden, ours.layers) == (text.vocab_size, text.hidden_size, text.num_hidden_layers)
    assert (ours.heads, ours.kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert ours.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    assert ours.context == text.max_position_embeddings
    assert ours.fields.positive("intermediate_size") == text.intermediate_size
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.dtype == str(theirs.dtype).removeprefix("torch.")
    assert ours.vision is not None
    assert ours.vision.image_token_id == theirs.image_token_id
    shape = ours.vision.tower
    assert (shape.hidden, shape.intermediate, shape.layers) == (
        tower.hidden_size, tower.intermediate_size, tower.num_hidden_layers,
    )  # fmt: skip
    assert (shape.heads, shape.image, shape.patch) == (tower.num_attention_heads, tower.image_size, tower.patch_size)
    assert (shape.eps, shape.activation) == (tower.layer_norm_eps, tower.hidden_act)
    ends = hf.GenerationConfig.from_pretrained(directory).eos_token_id
    assert read_defaults(directory, ours).eos_token_ids == tuple(ends if isinstance(ends, list) else [ends])
    known = published.processor.get("image_seq_len", published.images.get("image_seq_length"))
    assert features(directory) == (known or {336: 24**2, 384: 27**2}[shape.image])


@one_of_each(lambda published: (published.images, published.config["vision_config"], published.processor))
@pytest.mark.sample(2)
def test_pixels_are_those_of_transformers(published: Published, whole: Made) -> None:
    directory = whole(published)
    inputs, theirs = load_inputs(directory), image_processor(directory)
    by = read_image_normalisation(directory, read_config(directory))
    for seed, size in enumerate(((300, 420), (420, 300), (20, 31))):
        image = picture(*size, seed)
        expected = theirs([Image.fromarray(image)], return_tensors="pt")["pixel_values"].flatten(0, -4)
        ours = inputs.process(image).pixels
        assert ours.shape == expected.shape
        assert (normalised(ours, by) - expected).abs().max() < 1e-6


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root, made = tmp_path_factory.mktemp("small"), dict[str, Path]()

    def make(published: Published) -> Path:
        if published.name not in made:
            directory = made[published.name] = write(root / published.name, published, *published.small())
            torch.manual_seed(0)
            config = hf.AutoConfig.from_pretrained(directory)
            model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
            weights = root / "weights"
            checkpoints.draw(model).save_pretrained(weights)
            (weights / "model.safetensors").rename(directory / "model.safetensors")
            if published.old_names:
                edit_tensors(directory, both(INSIDE))
        return made[published.name]

    return make


PROMPTS = (("<image>the cat sat", 1), ("<image>sat <image>\non", 2), ("the cat sat", 0))


@one_of_each(
    lambda published: (
        published.small(),
        published.processor,
        published.generation,
        published.template,
        published.old_names,
    )
)
@pytest.mark.slow
def test_tokens_are_those_of_transformers(published: Published, small: Made) -> None:
    """With an image, with two and with none, all at once."""
    directory = small(published)
    model = hf.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    prepare, makes = load_preparer(ModelSettings(model=str(directory))), processor(published, directory)
    images = [picture(70, 110, 1), picture(60, 30, 2)]
    rig = make_rig(
        directory, dtype="float32", settings=SchedulerSettings(max_batched_tokens=8192 + 32, max_sequences=4)
    )
    requests, expected = {}, []
    for number, (text, count) in enumerate(PROMPTS):
        if count:
            values = reference.inputs(makes, text, images[:count])
        else:
            ids = torch.tensor([prepare.tokenizer.encode(text, True)])
            values = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if published.config["model_type"] == "paligemma":
                values["token_type_ids"] = torch.zeros_like(ids)
        expected.append(greedy(model, values))
        spec = Spec(
            text,
            tuple(encoded(image) for image in images[:count]),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=NEW, ignore_eos=True),
        )
        requests[number] = prepare.prepare(spec, rig.loaded.limits)
        assert requests[number].prompt.tolist() == values["input_ids"][0].tolist()
    results = rig.run(requests)
    assert [results[i].tokens for i in requests] == expected
    prepare.close()


CHATTY = [published for published in PUBLISHED if published.template is not None]


@pytest.mark.parametrize("published", CHATTY, ids=str)
def test_conversations_are_those_of_transformers(published: Published, whole: Made) -> None:
    directory = whole(published)
    makes, prepare = processor(published, directory), load_preparer(ModelSettings(model=str(directory)))
    for messages in CONVERSATIONS.values():
        text = prepare.render(Chat(messages_of(messages)), LIMITS)
        assert text == makes.apply_chat_template(messages, add_generation_prompt=True)
    prepare.close()
