"""Law: pixels, placeholders and ids are those of transformers' processors, in either layout of their files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)

from model.config import read_config
from model.errors import CheckpointError
from model.inputs.vision.processed import Normalisation
from model.inputs.vision.registry import read_image_normalisation
from model.inputs.vision.split import LARGEST, bounded, scaled, whole
from scheduler.invalid import InvalidRequest
from tests.model.vision.cases import BY_NAME, CASES, GRIDS, IMAGE, Case
from tests.model.vision.conftest import Shelf, load_inputs
from tests.model.vision.forward import encode
from tests.model.vision.pictures import picture

pytestmark = pytest.mark.sample(3)

SIZES = ((32, 32), (31, 33), (70, 110), (110, 70), (20, 150), (150, 20), (200, 200), (5, 7), (1, 1), (64, 32), (33, 97))

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def normalised(pixels: np.ndarray, by: Normalisation) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (by.mean, by.std))
    return (torch.from_numpy(pixels).float() * by.factor - mean) / std


@pytest.mark.parametrize("classic", [True, False], ids=["preprocessor_config", "processor_config"])
@pytest.mark.parametrize("case", [case for case in CASES if case.kind not in GRIDS], ids=str)
def test_pixels_are_those_of_transformers(case: Case, classic: bool, shelf: Shelf) -> None:
    """Normalised in float32 here, in float64 there: within a millionth."""
    directory, processor = shelf.checkpoint(case, classic), shelf.processor(case).image_processor
    by = read_image_normalisation(directory, read_config(directory))
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        tiles = shelf.inputs(case, classic).process(image)
        theirs = processor([Image.fromarray(image)], return_tensors="pt")["pixel_values"].flatten(0, -4)
        assert tiles.pixels.dtype == np.uint8
        assert theirs.shape == tiles.pixels.shape
        assert (normalised(tiles.pixels, by) - theirs).abs().max() < 1e-6


@pytest.mark.parametrize(("longest", "side"), [(1456, 364), (2048, 512), (1820, 364), (5000, 500), (128, 384)])
def test_sizes_are_those_of_transformers(longest: int, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images have any size, and no pixels."""
    processor, rng = Idefics3ImageProcessorPil(), np.random.default_rng(longest)
    monkeypatch.setattr(processor, "resize", lambda image, size, resample=None: size)
    for height, width in rng.integers(1, 5000, (400, 2)).tolist():
        first = bounded(*scaled(height, width, longest), LARGEST)
        assert first == get_resize_output_image_size(np.empty((3, height, width), np.uint8), longest)
        theirs = processor.resize_for_vision_encoder(np.empty((3, *first), np.uint8), side)
        assert whole(*first, side) == (theirs.height, theirs.width)


@each_case
def test_both_layouts_of_a_processor_say_the_same(case: Case, shelf: Shelf) -> None:
    assert shelf.inputs(case, classic=True) == shelf.inputs(case, classic=False)


def test_an_image_that_would_become_huge_is_refused(shelf: Shelf) -> None:
    """20,000 x 200 pixels are 4 million, and 400 million once they are squared."""
    line = np.zeros((200, 20_000, 3), np.uint8)
    with pytest.raises(InvalidRequest, match="20000 x 20000"):
        shelf.inputs(BY_NAME["llava-pad"]).process(line)
    shelf.inputs(BY_NAME["llava-clip"]).process(line)


PROMPTS = ("<image>the cat", "that <image>sat<image>\non <image>", "the rat <image>", "<image><image><image>")


@each_case
def test_ids_are_those_of_transformers(case: Case, shelf: Shelf) -> None:
    inputs, processor, tokenizer = shelf.inputs(case), shelf.processor(case), shelf.tokenizer(case)
    for seed, prompt in enumerate(PROMPTS):
        images = [picture(*SIZES[seed + 2 * i], seed) for i in range(prompt.count("<image>"))]
        tiles = [inputs.process(image) for image in images]
        theirs = processor(images=[[Image.fromarray(image) for image in images]], text=[prompt])["input_ids"][0]
        assert inputs.encode(prompt, tiles, tokenizer) == list(theirs)
        assert theirs.count(IMAGE) == sum(t.tokens for t in tiles)


def test_paligemma_puts_images_before_a_text_that_names_none(shelf: Shelf) -> None:
    case = BY_NAME["paligemma"]
    inputs, image = shelf.inputs(case), picture(40, 40)
    theirs = shelf.processor(case)(images=[[image]], text=["the cat"])["input_ids"][0]
    assert inputs.encode("the cat", [inputs.process(image)], shelf.tokenizer(case)) == list(theirs)


def test_smolvlm_writes_the_strings_of_idefics3(shelf: Shelf) -> None:
    """Its processor wants packages for videos to be made; the function that writes is asked itself."""
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    inputs = shelf.inputs(BY_NAME["smolvlm"])
    for size in SIZES:
        tiles = inputs.process(picture(*size))
        theirs = get_image_prompt_string(
            tiles.rows, tiles.columns, tiles.grid[1], "<fake_token_around_image>", "<image>", "<global-img>"
        )
        assert inputs.expand("a<image>b", [tiles]) == f"a{theirs}b"


@each_case
def test_placeholders_count_the_features(case: Case, shelf: Shelf) -> None:
    vision = shelf.decoder(case).vision
    assert vision is not None
    for size in SIZES[:4]:
        tiles = shelf.inputs(case).process(picture(*size))
        assert encode(vision, tiles).shape[1] == tiles.tokens


@each_case
def test_every_image_has_its_marker(case: Case, shelf: Shelf) -> None:
    """But a PaliGemma's text that names none has all before it."""
    inputs = shelf.inputs(case)
    wrong = [("<image><image>", 1), ("<image>", 2)] + ([] if case.name.startswith("paligemma") else [("the cat", 1)])
    for prompt, count in wrong:
        with pytest.raises(InvalidRequest, match=rf"with {prompt.count('<image>')} <image>.* needs {count},"):
            inputs.expand(prompt, [inputs.process(picture(40, 40))] * count)


def test_ids_must_have_as_many_placeholders_as_features(shelf: Shelf) -> None:
    inputs = shelf.inputs(BY_NAME["llava-clip"])
    tiles = [inputs.process(picture(40, 40))] * 2
    inputs.check([5, *[IMAGE] * 16, 6, *[IMAGE] * 16], tiles)
    inputs.check([5, 6], [])
    for found, images, needed in (
        (31, tiles, r"32 \(16 \+ 16\) for 2"),
        (17, tiles[:1], "16 for 1"),
        (1, [], "0 for 0"),
    ):
        with pytest.raises(InvalidRequest, match=rf"{found} image placeholders.* needs {needed} images"):
            inputs.check([IMAGE] * found, images)


SPOILT = {
    "another size": ("llava-clip", {"crop_size": {"height": 40, "width": 40}}, "32 x 32"),
    "no size": ("paligemma", {"size": {"depth": 3}}, "'size'"),
    "a filter that is none": ("smolvlm", {"resample": 77}, "'resample'"),
    "a mean of one channel": ("idefics3", {"image_mean": [0.5]}, "'image_mean'"),
    "a deviation of 0": ("idefics3", {"image_std": [0.5, 0, 0.5]}, "'image_std'"),
    "tiles of any size": ("idefics3", {"do_resize": False}, "'do_resize'"),
    "tiles that squares do not divide": ("idefics3", {"max_image_size": {"longest_edge": 28}}, "do not divide"),
    "tiles of no edge": ("idefics3", {"max_image_size": {"edge": 32}}, "'longest_edge'"),
}


def load_inputs_of(directory: Path) -> Path:
    load_inputs(directory)
    return directory


@pytest.mark.parametrize("name", SPOILT)
def test_a_processor_that_does_not_fit_is_refused(name: str, shelf: Shelf, tmp_path: Path) -> None:
    case, changes, message = SPOILT[name]
    directory = tmp_path / "model"
    directory.mkdir()
    for file in shelf.checkpoint(BY_NAME[case]).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        read_image_normalisation(load_inputs_of(directory), read_config(directory))


def test_a_missing_processor_is_named(shelf: Shelf, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((shelf.checkpoint(BY_NAME["idefics3"]) / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing"):
        load_inputs(tmp_path)
