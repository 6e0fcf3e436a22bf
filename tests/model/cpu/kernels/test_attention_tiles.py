"""Attention in matrix registers: for which heads, beside what vectors compute, and planted faults.

Where a CPU has them, the tests of attention (`tests/model/test_attention.py`) run on them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cache_manager.layout import KVLayout
from model.cpu.attention_backend import CpuAttention
from model.cpu.kernels.attention_tiles import AttentionTiles
from model.cpu.kernels.kv import Heads
from model.cpu.kernels.native import Compiler
from model.cpu.kernels.program import Machine
from model.cpu.kernels.team import Team
from tests.model.test_attention import TOLERANCE, Case, Pool
from tests.support.planted import plant

Method = Callable[..., object]
LENGTHS = ((0, 40), (600, 1), (530, 30), (3, 2))


@pytest.fixture(name="fresh")
def machine_with_tiles(machine: Machine) -> Machine:
    """A machine of its own, whose kernels no other test gets."""
    if not machine.compiler.has_tiles:
        pytest.skip("this process has no matrix registers (AMX)")
    return Machine(Compiler(None), Team())


def outputs(case: Case, machine: Machine, has_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Attention of a step, behind one that writes what was before it."""
    monkeypatch.setattr("tests.model.test_attention.the_machine", lambda: machine)
    monkeypatch.setattr(machine.compiler, "has_tiles", has_tiles)
    pool = Pool(case)
    pool.step([(i, 0, before) for i, (before, _) in enumerate(case.lengths) if before])
    return pool.step([(i, before, count) for i, (before, count) in enumerate(case.lengths)])


@pytest.mark.parametrize(
    "shape",
    [
        {"group": 3, "head_dim": 64},
        {"group": 1, "head_dim": 32, "sinks": True},
        {"group": 5, "head_dim": 96, "page_size": 7, "kv_heads": 1},
        {"group": 20, "head_dim": 32, "kv_heads": 1, "sloped": True},
        {"group": 16, "head_dim": 96, "latent": 64},
        {"group": 4, "head_dim": 128, "windows": (100, None)},
    ],
)
def test_is_near_what_vectors_compute(fresh: Machine, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, weights and values are of bfloat16 in both: sums differ in their order alone."""
    case = Case(LENGTHS, dtype="bfloat16", kernels=True, **shape)
    found, expected = (outputs(case, fresh, tiles, monkeypatch) for tiles in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=0)


def of_one_block(original: Method) -> Method:
    """The first block's keys stand for those of all."""
    return lambda tiles, queries, keys, *rest: original(tiles, queries, keys[:1] * len(keys), *rest)


def of_blocks_in_reverse(original: Method) -> Method:
    """Values have the weights of other blocks."""
    return lambda tiles, mixed, values, *rest: original(tiles, mixed, values[::-1], *rest)


def of_another_query(original: Method) -> Method:
    """Neighbouring rows are exchanged."""
    return lambda tiles, row, query: original(tiles, row ^ 1, query)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("release", lambda original: original),
        ("put_scores", of_one_block),
        ("mix", of_blocks_in_reverse),
        ("put_query", of_another_query),
    ],
)
def test_a_planted_fault_is_found(
    fresh: Machine, name: str, fault: Callable[[Method], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(LENGTHS, group=4, head_dim=64, dtype="bfloat16", kernels=True)
    expected = outputs(case, fresh, False, monkeypatch)
    plant(monkeypatch, AttentionTiles, name, fault)
    found = outputs(case, fresh, True, monkeypatch)
    off = max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))
    assert (off > TOLERANCE["bfloat16"]) == (name != "release")


@pytest.mark.parametrize(
    ("dtype", "changes", "tiled"),
    [
        ("bfloat16", {}, True),
        ("bfloat16", {"has_tiles": False}, False),
        ("bfloat16", {"dim": 48}, False),
        ("bfloat16", {"heads": 34}, False),
        ("bfloat16", {"heads": 40}, True),
        ("bfloat16", {"eight_bit": "int8"}, False),
        ("float32", {}, False),
    ],
)
def test_they_are_for_bfloat16_whose_keys_fill_them(
    machine: Machine, dtype: str, changes: dict[str, Any], tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.compiler, "has_tiles", changes.get("has_tiles", True))
    layout = KVLayout.uniform(((0,),), 2, changes.get("dim", 64), 2, 16)
    heads = changes.get("heads", 6)
    made = CpuAttention(machine, layout, 1, heads, dtype, eight_bit=changes.get("eight_bit"))
    queries = torch.zeros((1, heads * changes.get("dim", 64)), dtype=getattr(torch, dtype))
    names = [call.name for call in made.calls(0, queries, queries.clone())]
    assert [name.endswith("_tiled") for name in names] == [tiled, tiled, False]


@pytest.mark.parametrize(("rows", "at_once"), [(1, 1), (16, 16), (20, 10), (30, 15), (32, 16), (17, 1)])
def test_rows_are_cut_into_equal_parts(rows: int, at_once: int) -> None:
    heads, nothing = Heads(1, 1, 32, None), None  # type: ignore[arg-type]
    assert AttentionTiles(nothing, heads, rows, None).at_once == at_once  # type: ignore[arg-type]
