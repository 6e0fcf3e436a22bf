"""A law: a checkpoint with a damaged tensor loads, or is refused with an error that names a tensor."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.errors import CheckpointError
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.styles import edit_tensors
from tests.model.test_weights import load_it
from tests.model.weight_formats.compressed import compress
from tests.model.weight_formats.recipes import FP8_BLOCK, INT8_ZEROS, W4_ZEROS, W4_ZEROS_ORDER
from tests.model.weight_formats.test_activations import FP8_STATIC, W8A8
from tests.model.weight_formats.test_groups import linears

pytestmark = pytest.mark.sample(3)

DTYPES = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float64, torch.float32, torch.float16,
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
COUNT = 170  # of each recipe: a thousand in all
SHAPES = ((), (0,), (1,), (3, 4, 5))


def _byte(tensor: Tensor, rng: random.Random) -> Tensor:
    flat = tensor.view(-1).view(torch.uint8)
    flat[rng.randrange(len(flat))] = rng.choice((0, 127, 128, 255))
    return tensor


Mutation = Callable[[Tensor, random.Random], Tensor | None]
MUTATIONS: tuple[Mutation, ...] = (
    _byte,
    lambda tensor, rng: None,
    lambda tensor, rng: tensor.float().to(rng.choice(DTYPES)),
    lambda tensor, rng: tensor[: rng.randrange(len(tensor) + 1)],
    lambda tensor, rng: tensor.reshape(-1),
    lambda tensor, rng: torch.zeros(rng.choice(SHAPES), dtype=tensor.dtype),
)
RECIPES = {"packed": W4_ZEROS, "in order": W4_ZEROS_ORDER, "int": INT8_ZEROS, "W8A8": W8A8, "FP8": FP8_STATIC,
           "blocks": FP8_BLOCK}  # fmt: skip


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("mutations"))


def damage(directory: Path, mutation: Mutation, rng: random.Random) -> str:
    """Returns the name of the tensor."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = rng.choice([name for name in tensors if "layers.1" in name and "proj." in name])
    made = mutation(tensors.pop(name).clone(), rng)
    edit_tensors(directory, lambda _: tensors if made is None else tensors | {name: made})
    return name


def refusal(directory: Path) -> str:
    """The error, empty where the checkpoint loads."""
    try:
        load_it(directory, backend="reference")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.slow
def test_a_damaged_tensor_is_refused_or_harmless(name: str, shelf: Shelf, tmp_path: Path) -> None:
    source = shelf.checkpoint(BY_NAME["llama-biases"])
    directory, plain = (Path(shutil.copytree(source, tmp_path / copy)) for copy in ("compressed", "plain"))
    compress(directory, plain, linears(source), [RECIPES[name]])
    whole, rng, refused = (directory / "model.safetensors").read_bytes(), random.Random(name), 0
    for number in range(COUNT):
        (directory / "model.safetensors").write_bytes(whole)
        damaged = damage(directory, MUTATIONS[number % len(MUTATIONS)], rng)
        message = refusal(directory)
        refused += bool(message)
        assert not message or damaged in message or "cannot compute a token" in message
    assert refused >= COUNT // 2
