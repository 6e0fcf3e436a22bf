"""Law: images of Gemma 4 have the sizes, pixels and strings that transformers gives them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from model.config import read_config
from model.errors import CheckpointError
from model.inputs.vision.patch_budget import budgeted
from model.inputs.vision.registry import read_image_inputs, read_image_normalisation
from scheduler.invalid import InvalidRequest
from tests.model.vision.cases import BY_NAME, CASES, Case
from tests.model.vision.conftest import Shelf, load_decoder, load_inputs
from tests.model.vision.pictures import picture
from tests.model.vision.test_grids import changed
from tests.model.vision.test_tiles import normalised

pytestmark = pytest.mark.sample(3)

SIZES = ((1, 1), (8, 8), (31, 33), (70, 110), (110, 70), (20, 150), (200, 200), (5, 250), (64, 32), (100, 4000))
OURS = [case for case in CASES if case.name.startswith("gemma4")]


@pytest.mark.parametrize("classic", [True, False], ids=["preprocessor_config", "processor_config"])
@pytest.mark.parametrize("case", OURS, ids=str)
def test_pixels_are_those_of_transformers(case: Case, classic: bool, shelf: Shelf) -> None:
    """Patch by patch, as the encoder has them after it has made -1 to 1 of 0 to 1."""
    directory, processor = shelf.checkpoint(case, classic), shelf.processor(case).image_processor
    by, size = read_image_normalisation(directory, read_config(directory)), processor.patch_size
    for seed, sides in enumerate(SIZES):
        image = picture(*sides, seed)
        ours = shelf.inputs(case, classic).process(image)
        theirs = processor([Image.fromarray(image)], return_tensors="pt")
        assert ours.tokens == theirs["num_soft_tokens_per_image"][0]
        cut = normalised(ours.pixels, by)[0].unfold(1, size, size).unfold(2, size, size)
        cut = cut.permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1)
        there = theirs["pixel_values"][0, : len(cut)]
        assert (cut - 2 * (there - 0.5)).abs().max() < 1e-6


@pytest.mark.parametrize("features", [70, 280, 1120])
def test_sizes_are_those_of_transformers(features: int) -> None:
    rng = np.random.default_rng(features)
    for height, width in np.exp(rng.uniform(0, np.log(6000), (500, 2))).astype(int).tolist():
        try:
            theirs = get_aspect_ratio_preserving_size(height, width, 16, features * 9, 3)
        except ValueError:
            with pytest.raises(InvalidRequest, match=f"{width} x {height} pixels"):
                budgeted(height, width, 48, features)
        else:
            assert budgeted(height, width, 48, features) == theirs


SPOILT = {
    "another patch": ("preprocessor_config.json", {"patch_size": 8}, "'patch_size' is 8.* has 4"),
    "another square": ("preprocessor_config.json", {"pooling_kernel_size": 3}, "'pooling_kernel_size' is 3.* has 2"),
    "no resizing": ("preprocessor_config.json", {"do_resize": False}, "'do_resize'"),
    "another number of features": ("preprocessor_config.json", {"max_soft_tokens": 71}, "must be one of 70, 140"),
    "few positions": ("preprocessor_config.json", {"max_soft_tokens": 140}, "'position_embedding_size' is 200"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_processor_that_does_not_fit_is_refused(name: str, shelf: Shelf, tmp_path: Path) -> None:
    file, changes, message = SPOILT[name]
    source = shelf.checkpoint(BY_NAME["gemma4-vision"])
    with pytest.raises(CheckpointError, match=message):
        load_inputs(changed(source, tmp_path / "model", file, changes))


WRONG: dict[str, tuple[str, dict[str, object], str]] = {
    "heads that do not turn": ("vision_config", {"head_dim": 18}, "'head_dim' is 18"),
    "keys of fewer heads": ("vision_config", {"num_key_value_heads": 1}, "'num_key_value_heads' is 1"),
    "a large square": ("vision_config", {"pooling_kernel_size": 9}, "'pooling_kernel_size' is 9"),
    "another rotation": ("vision_config", {"rope_parameters": {"rope_type": "default"}}, "'rope_type' is 'default'"),
    "biases": ("vision_config", {"attention_bias": True}, "'attention_bias' is True"),
    "another padding": ("text_config", {"pad_token_id": 7}, "'pad_token_id' is 7"),
    "an encoder of text": ("text_config", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit_is_refused(name: str, shelf: Shelf, tmp_path: Path) -> None:
    section, changes, message = WRONG[name]
    source = shelf.checkpoint(BY_NAME["gemma4-vision"])
    values = json.loads((source / "config.json").read_text())[section] | changes
    with pytest.raises(CheckpointError, match=message):
        load_decoder(changed(source, tmp_path / "model", "config.json", {section: values}))


def test_images_that_see_both_ways_are_not_served_but_text_is(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = BY_NAME["gemma4-vision"]
    source = shelf.checkpoint(case)
    values = json.loads((source / "config.json").read_text())["text_config"] | {"use_bidirectional_attention": "vision"}
    directory = changed(source, tmp_path / "model", "config.json", {"text_config": values})
    (directory / "preprocessor_config.json").unlink()
    assert read_image_inputs(directory, read_config(directory), shelf.tokenizer(case)) is None
    assert "Images are not served: features of an image see each other in both directions" in caplog.text
    ours, seeing = load_decoder(directory), shelf.decoder(case)
    assert ours.vision is None
    assert seeing.vision is not None
    assert torch.equal(ours.embedding.tokens.look_up(torch.arange(9)), seeing.embedding.tokens.look_up(torch.arange(9)))
