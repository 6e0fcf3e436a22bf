"""Law: images of any resolution have the pixels, grids and positions that transformers gives them."""

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from model.config import read_config
from model.errors import CheckpointError
from model.inputs.images import decode_image
from model.inputs.vision.any_resolution import LARGEST_RATIO, fitted
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.registry import read_image_normalisation
from model.rotary_rows import prompt_positions
from scheduler.invalid import InvalidRequest
from scheduler.settings import ImageLimits
from tests.model.vision import reference
from tests.model.vision.cases import BY_NAME, CASES, IMAGE, QWEN, Case
from tests.model.vision.conftest import Shelf, load_inputs
from tests.model.vision.pictures import picture
from tests.model.vision.test_tiles import normalised

pytestmark = pytest.mark.sample(3)

SIZES = (
    (1, 1), (1, 7), (8, 8), (31, 33), (70, 110), (110, 70), (20, 150), (200, 200), (5, 500), (64, 32), (100, 4000),
    (4000, 100), (3, 600), (777, 31),
)  # fmt: skip
each = pytest.mark.parametrize("case", [case for case in CASES if case.kind in QWEN], ids=str)


def patches(pixels: torch.Tensor, patch: int, merge: int, frames: int) -> torch.Tensor:
    """[patches, 3 x frames x patch x patch] of normalised pixels [3, height, width], patch by patch."""
    rows, columns = (length // patch for length in pixels.shape[1:])
    order = [
        (top + row, left + column)
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for row in range(merge)
        for column in range(merge)
    ]
    cut = [pixels[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch] for r, c in order]
    return torch.stack([one[:, None].expand(-1, frames, -1, -1).flatten() for one in cut])


@pytest.mark.parametrize("classic", [True, False], ids=["preprocessor_config", "processor_config"])
@each
def test_pixels_and_grids_are_those_of_transformers(case: Case, classic: bool, shelf: Shelf) -> None:
    directory, processor = shelf.checkpoint(case, classic), shelf.processor(case).image_processor
    by = read_image_normalisation(directory, read_config(directory))
    merge, frames = processor.merge_size, processor.temporal_patch_size
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        ours = shelf.inputs(case, classic).process(image)
        theirs = processor([Image.fromarray(image)], return_tensors="pt")
        time, rows, columns = theirs["image_grid_thw"][0].tolist()
        assert ours.grid == (time, rows // merge, columns // merge)
        cut = patches(normalised(ours.pixels, by)[0], processor.patch_size, merge, frames)
        assert cut.shape == theirs["pixel_values"].shape
        assert (cut - theirs["pixel_values"]).abs().max() < 1e-6


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_images_of_any_mode_are_those_of_transformers(mode: str, shelf: Shelf) -> None:
    """With transparency too."""
    case = BY_NAME["qwen2-vl"]
    image = Image.fromarray(picture(50, 90)).convert("RGBA")
    image.putalpha(Image.fromarray(picture(50, 90, 1)).convert("L"))
    image = image.convert(mode)
    file = BytesIO()
    image.save(file, "PNG")
    ours = shelf.inputs(case).process(decode_image(file.getvalue(), "images", ImageLimits()))
    theirs = shelf.processor(case).image_processor([Image.open(file)], return_tensors="pt")["pixel_values"]
    by = read_image_normalisation(shelf.checkpoint(case), read_config(shelf.checkpoint(case)))
    assert (patches(normalised(ours.pixels, by)[0], 4, 2, 2) - theirs).abs().max() < 1e-6


@pytest.mark.parametrize(("side", "least", "most"), [(28, 3136, 1003520), (32, 65536, 16777216), (8, 64, 640)])
def test_sizes_are_those_of_transformers(side: int, least: int, most: int) -> None:
    rng = np.random.default_rng(side)
    for height, width in [(1, 1), (1, 200), (200, 1), *np.exp(rng.uniform(0, np.log(6000), (500, 2))).astype(int)]:
        size = int(height), int(width)
        if max(size) > LARGEST_RATIO * min(size):
            with pytest.raises(InvalidRequest, match="at most 200 times"):
                fitted(*size, side, least, most)
        else:
            assert fitted(*size, side, least, most) == smart_resize(*size, side, least, most)


def rope_positions(case: Case, shelf: Shelf, prompt: str, images: list[NDArray[np.uint8]]) -> torch.Tensor:
    """[axes, ids] of transformers' model."""
    values = reference.inputs(shelf.processor(case), prompt, images)
    wanted = {key: values[key] for key in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    positions, _ = shelf.reference(case).model.get_rope_index(**wanted)
    return positions[:, 0]


@pytest.mark.parametrize("prompt", ["<image>a", "ab<image>cd<image>e", "a <image> <image> <image>", "<image>"])
@each
def test_positions_are_those_of_transformers(case: Case, prompt: str, shelf: Shelf) -> None:
    """Something stands between two images, as chat templates write it: transformers joins them otherwise."""
    sizes = ((31, 70), (20, 150), (90, 40))
    pictures = [picture(*sizes[i]) for i in range(prompt.count("<image>"))]
    images = [shelf.inputs(case).process(one) for one in pictures]
    ids = shelf.inputs(case).encode(prompt, images, shelf.tokenizer(case))
    made, _ = prompt_positions(len(ids), placed(ids, images), 3)  # type: ignore[arg-type]
    assert np.array_equal(made, rope_positions(case, shelf, prompt, pictures))


def placed(ids: list[int], images: list[ProcessedImage]) -> list[SimpleNamespace]:
    free, made = np.flatnonzero(np.array(ids) == IMAGE).astype(np.int32), []
    for image in images:
        made.append(SimpleNamespace(places=free[: image.tokens], positions=image.positions))
        free = free[image.tokens :]
    return made


SPOILT = {
    "another patch": ({"patch_size": 14}, "'patch_size' is 14.* has 4"),
    "another square": ({"merge_size": 3}, "'merge_size' is 3.* has 2"),
    "another number of pictures": ({"temporal_patch_size": 1}, "'temporal_patch_size' is 1.* has 2"),
    "no resizing": ({"do_resize": False}, "'do_resize'"),
    "bounds crossed": ({"size": {"shortest_edge": 900, "longest_edge": 800}}, "at least 900 pixels"),
    "no number": ({"size": {"shortest_edge": -1, "longest_edge": 800}}, "'shortest_edge'"),
}


def changed(directory: Path, to: Path, file: str, changes: dict[str, object]) -> Path:
    to.mkdir(exist_ok=True)
    for one in directory.iterdir():
        (to / one.name).write_bytes(one.read_bytes())
    values = json.loads((to / file).read_text())
    (to / file).write_text(json.dumps(values | changes))
    return to


@pytest.mark.parametrize("name", SPOILT)
def test_a_processor_that_does_not_fit_is_refused(name: str, shelf: Shelf, tmp_path: Path) -> None:
    changes, message = SPOILT[name]
    source = shelf.checkpoint(BY_NAME["qwen2-vl"])
    with pytest.raises(CheckpointError, match=message):
        load_inputs(changed(source, tmp_path / "model", "preprocessor_config.json", changes))


def test_the_hubs_bounds_win(shelf: Shelf, tmp_path: Path) -> None:
    """'min_pixels' and 'max_pixels', as checkpoints on the Hub have them, before 'size'."""
    source = shelf.checkpoint(BY_NAME["qwen2-vl"])
    directory = changed(source, tmp_path / "m", "preprocessor_config.json", {"min_pixels": 6400, "max_pixels": 12800})
    assert load_inputs(directory).process(picture(8, 8)).grid == (1, 10, 10)
    assert load_inputs(directory).process(picture(400, 100)).grid == (1, 28, 7)


WRONG: dict[str, tuple[str, dict[str, object], str]] = {
    "sections that do not fit": ("text_config", {"rope_parameters": {"mrope_section": [1, 2, 3]}}, "'mrope_section'"),
    "two sections": ("text_config", {"rope_parameters": {"mrope_section": [4, 4]}}, "'mrope_section'"),
    "a table that is no square": ("vision_config", {"num_position_embeddings": 24}, "'num_position_embeddings'"),
    "a layer that is none": ("vision_config", {"deepstack_visual_indexes": [4]}, "'deepstack_visual_indexes'"),
    "a layer twice": ("vision_config", {"deepstack_visual_indexes": [1, 1]}, "'deepstack_visual_indexes'"),
    "more depths than layers": ("vision_config", {"deepstack_visual_indexes": [0, 1, 2]}, "3 further features"),
    "heads that do not turn": ("vision_config", {"num_heads": 32}, "'num_heads'"),
    "a patch of many pixels": ("vision_config", {"patch_size": 4096}, "'patch_size'"),
    "a patch that is no square": ("vision_config", {"patch_size": [4, 8]}, "'patch_size'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit_is_refused(name: str, shelf: Shelf, tmp_path: Path) -> None:
    section, changes, message = WRONG[name]
    source = shelf.checkpoint(BY_NAME["qwen3-vl"])
    values = json.loads((source / "config.json").read_text())[section] | changes
    with pytest.raises(CheckpointError, match=message):
        read_config(changed(source, tmp_path / "model", "config.json", {section: values}))
