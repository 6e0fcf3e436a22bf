"""Weights that are put into 4 bits at load: their numbers, the models, what is held."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.architectures.registry import build_model
from model.config import read_config
from model.errors import CheckpointError
from model.footprint import weight_bytes
from model.tensors import Tensors
from model.weight_formats import int4
from model.weight_formats.groups import bring_back
from model.weight_formats.int4 import Floats, Int4Format, group_size, quantize_groups
from model.weight_formats.int8 import quantize
from model.weight_formats.plain import plain_weight
from model.weight_formats.registry import open_weight_format
from model.weights import Checkpoint
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.styles import edit_tensors
from tests.model.test_quantization import NOT_LINEAR
from tests.support.engines import make_request, make_rig
from tests.support.examples import examples
from tests.support.planted import plant

pytestmark = pytest.mark.sample(3)

IN_8_BITS = re.compile(r"lm_head\.weight|embed_out\.weight|embed_in\.|embed_tokens\.|wte\.")
CASES = ("llama", "llama-tied", "gpt2", "mixtral", "phi3", "gpt-neox")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("int4"))


def rounded_between(rows: Tensor, size: int) -> Tensor:
    """The weights with 16 levels from the smallest to the largest of a group, in float64."""
    out, width = rows.shape
    made = np.empty((out, width))
    for start in range(0, width, size):
        part = rows[:, start : start + size].double().numpy()
        low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
        step = np.where(high == low, 1.0, (high - low) / 15)
        made[:, start : start + size] = np.round((part - low) / step) * step + low
    return torch.from_numpy(made)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from([0.01, 1.0, 100.0]), st.integers(0, 2**16))
def test_a_group_loses_at_most_what_rounding_between_its_extremes_does(
    out: int, width: int, size: float, seed: int
) -> None:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(out, width)) * size).float()
    group = group_size(width)
    groups = quantize_groups(rows, group)
    assert groups.values.max() < 16
    found = bring_back(groups).double()
    groups_of = torch.arange(width) // group
    squares = torch.zeros(2, out, int(groups_of.max()) + 1, dtype=torch.float64)
    for kind, made in enumerate((found, rounded_between(rows, group))):
        squares[kind].index_add_(1, groups_of, (made - rows).square())
    # Scales and offsets have 11 bits. An offset is at most 8 scales beyond the largest weight.
    slack = (rows.abs().amax() * 2**-9) ** 2 * group
    assert (squares[0].sqrt() <= squares[1].sqrt() * 1.05 + slack.sqrt()).all()


def test_equal_weights_are_kept_as_16_bits_hold_them() -> None:
    for number in (0.0, 3.0, -0.125):
        assert (bring_back(quantize_groups(torch.full((3, 64), number), 32)) == number).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_a_group_that_is_not_finite_does_not_become_one_that_is(bad: float) -> None:
    rows = torch.ones(2, 64)
    rows[1, 40] = bad
    found = bring_back(quantize_groups(rows, 32)).isfinite()
    assert found[0].all()
    assert found[1, :32].all()
    assert not found[1, 32:].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e7])
def test_weights_that_4_bits_cannot_hold_end_the_start(bad: float) -> None:
    rows = torch.ones(2, 64)
    rows[1, 40] = bad
    with pytest.raises(CheckpointError, match=r"h.mlp has weights .* --quantization int4 cannot hold; use int8"):
        Int4Format().groups(plain_weight(rows, "h.mlp"))


@pytest.mark.parametrize(("width", "expected"), [(4096, 32), (48, 24), (40, 8), (100, 32), (37, 32), (6, 32)])
def test_sizes_of_groups(width: int, expected: int) -> None:
    assert group_size(width) == expected


def meant(rows: Tensor) -> Tensor:
    return bring_back(quantize_groups(rows, group_size(rows.shape[1])))


def in_8_bits(rows: Tensor) -> Tensor:
    values, scales = quantize(rows.float())
    return values.float() * scales[:, None]


def plain_twin(case: str, shelf: Shelf, root: Path) -> tuple[Path, Path]:
    """The checkpoint, and one with the plain weights that its 4 bits stand for. Embeddings of tokens are in 8 bits, and
    output layers, tied ones too.
    """
    source = shelf.checkpoint(BY_NAME[case])
    twin = Path(shutil.copytree(source, root / "twin"))

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        linear = [name for name, tensor in tensors.items() if tensor.ndim == 2 and not NOT_LINEAR.search(name)]
        made, in_8 = dict(tensors), [name for name in tensors if IN_8_BITS.search(name)]
        assert in_8
        for name in in_8:
            made[name] = in_8_bits(tensors[name])
        for name in set(linear) - set(in_8):
            made[name] = meant(tensors[name].T).T.contiguous() if case == "gpt2" else meant(tensors[name])
        return made

    edit_tensors(twin, change)
    return source, twin


def logits(directory: Path, backend: str, quantization: str | None, **kind: int) -> list[np.ndarray]:
    rig = make_rig(
        directory,
        16,
        2048,
        SchedulerSettings(),
        True,
        backend=backend,
        quantization=quantization,
        dtype="float32",
        **kind,
    )
    rig.run({place: make_request(rig, PROMPTS[place], 6) for place in FEW[:4]})
    return [np.stack([rig.logits[place, position] for position in range(6)]) for place in FEW[:4]]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", [*CASES, "gemma", "opt", "opt-post-norm"])
@pytest.mark.sample(2)
def test_logits_are_those_of_what_4_bits_stand_for(case: str, backend: str, shelf: Shelf, tmp_path: Path) -> None:
    source, twin = plain_twin(case, shelf, tmp_path)
    for found, expected in zip(logits(source, backend, "int4"), logits(twin, "reference", None), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("case", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_schedule_changes_a_bit(case: str, backend: str, shelf: Shelf) -> None:
    directory = shelf.checkpoint(BY_NAME[case])
    together = make_rig(directory, 16, 2048, SchedulerSettings(), True, backend=backend, quantization="int4")
    together.run({place: make_request(together, PROMPTS[place], 6) for place in FEW})
    for place in FEW[:3]:
        alone = make_rig(
            directory, 4, 256, SchedulerSettings(prefill_chunk=3), True, backend=backend, quantization="int4"
        )
        alone.run({place: make_request(alone, PROMPTS[place], 6)})
        assert alone.results[place].tokens == together.results[place].tokens
        assert alone.logits_of(place) == together.logits_of(place)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_is_held(case: str, dtype: str, shelf: Shelf) -> None:
    config = read_config(shelf.checkpoint(BY_NAME[case]))
    weights = open_weight_format(config, "int4")
    tensors = Tensors(Checkpoint(shelf.checkpoint(BY_NAME[case])), getattr(torch, dtype), torch.device("cpu"), weights)
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, dtype, "int4") < weight_bytes(config, dtype, "int8")


def test_kernels_are_used(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "quire.model"):
        logits(shelf.checkpoint(BY_NAME["llama"]), "auto", "int4")
    assert "kernels are not used" not in caplog.text


def test_two_ranks_are_as_near_as_one(shelf: Shelf) -> None:
    """Linears whose inputs are divided have other groups: other numbers."""
    directory = shelf.checkpoint(BY_NAME["llama"])
    exact, one, two = (
        logits(directory, "auto", how, ranks=ranks) for how, ranks in ((None, 1), ("int4", 1), ("int4", 2))
    )
    errors = [np.mean([np.abs(a[0] - b[0]).mean() for a, b in zip(kind, exact, strict=True)]) for kind in (one, two)]
    assert 0 < errors[1] < 1.5 * errors[0]


Rounding = Callable[[Floats, Floats, Floats], Floats]


def truncated(_: Rounding) -> Rounding:
    return lambda weights, scale, offset: np.clip(np.trunc((weights - offset) / np.where(scale == 0, 1, scale)), -8, 7)


def one_more(nearest: Rounding) -> Rounding:
    return lambda weights, scale, offset: np.clip(nearest(weights, scale, offset) + 1, -8, 7)


@pytest.mark.parametrize("fault", [truncated, one_more])
def test_harness_catches(fault: Callable[[Rounding], Rounding], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, int4, "_nearest", fault)
    with pytest.raises(AssertionError):
        test_a_group_loses_at_most_what_rounding_between_its_extremes_does()
