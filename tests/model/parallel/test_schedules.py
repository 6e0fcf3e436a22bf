"""Law: for one degree of parallelism any schedule gives logits with the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from model.cpu import shared_memory
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.exchange import meet
from model.cpu.kernels.rows import shared_rows
from model.cpu.kernels.values import LANES
from model.cpu.shared_memory import SharedMemory
from scheduler.parameters import Beam
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.checkpoints import write_llama
from tests.support.engines import GROUPS, Key, Rig, make_request, make_rig
from tests.support.swaps import always_swap

NEW = 8
PROMPTS = random_prompts([1, 2, 3, 5, 7, 9, 16, 17, 31, 33, 48, 70, 90])
STEPS = SchedulerSettings(max_sequences=32, max_batched_tokens=256)
NARROW = SchedulerSettings(max_sequences=5, max_batched_tokens=11, prefill_chunk=5)
SCHEDULES: dict[str, dict[str, Any]] = {
    "reversed": {"reverse": True},
    "chunks of 5, few rows": {"settings": NARROW, "page_size": 7},
    "two steps in flight": {"settings": replace(STEPS, steps_in_flight=2), "page_size": 1},
    "preempted": {"settings": STEPS, "pool_tokens": 128, "page_size": 1},
    "computed again": {"settings": replace(STEPS, recompute=True), "reverse": True},
}


def run(directory: Path, ranks: int, reverse: bool = False, **kind: Any) -> Rig:
    kind = {"settings": STEPS, "dtype": "float32", "record_logits": True} | kind
    rig = make_rig(directory, queue=ENDLESS, ranks=ranks, **kind)
    order = range(len(PROMPTS))
    rig.run({i: make_request(rig, PROMPTS[i], NEW) for i in (reversed(order) if reverse else order)})
    return rig


def tokens_of(rig: Rig) -> dict[Key, list[int]]:
    return {key: result.tokens for key, result in rig.results.items()}


def same(rig: Rig, other: Rig) -> None:
    assert tokens_of(rig) == tokens_of(other)
    assert all(rig.logits_of(i) == other.logits_of(i) for i in range(len(PROMPTS)))


RECURRENT = ["qwen3.5", "kimi-linear", "nemotron-h", "lfm2"]


@pytest.mark.parametrize("name", ["chunks of 5, few rows", "two steps in flight", "computed again"])
@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.sample(3)
def test_recurrent_states(kind: str, name: str, shelf: Shelf) -> None:
    directory = shelf.checkpoint(BY_NAME[kind])
    same(run(directory, 2, **SCHEDULES[name]), run(directory, 2))


@pytest.fixture(scope="session")
def sixes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 heads over 6 of keys: for 2, 3 and 6 ranks."""
    directory = tmp_path_factory.mktemp("sixes")
    return write_llama(directory, hidden_size=96, num_attention_heads=6, num_key_value_heads=6, num_hidden_layers=2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.slow
def test_three_ranks(name: str, backend: str, sixes: Path) -> None:
    rig = run(sixes, 3, backend=backend, **SCHEDULES[name])
    assert bool(rig.preemptions) == (name == "preempted")
    same(rig, run(sixes, 3, backend=backend))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ranks_that_share_no_memory(backend: str, sixes: Path) -> None:
    """Steps of which no logits are wanted are among them."""
    rig = run(sixes, 3, backend=backend, apart=True, **SCHEDULES["chunks of 5, few rows"])
    same(rig, run(sixes, 3, backend=backend))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_with_two_threads_each(dtype: str, sixes: Path, two_threads: None) -> None:
    same(run(sixes, 2, dtype=dtype, **SCHEDULES["preempted"]), run(sixes, 2, dtype=dtype))


@pytest.mark.parametrize("kind", ["mixtral", "gemma2", "falcon"])
def test_other_layers(kind: str, shelf: Shelf) -> None:
    directory = shelf.checkpoint(BY_NAME[kind])
    same(run(directory, 4, **SCHEDULES["chunks of 5, few rows"]), run(directory, 4))


def swapped(directory: Path, monkeypatch: pytest.MonkeyPatch, record: bool = True) -> Rig:
    """All prompts once, in a pool that holds the longest of them and little else."""
    always_swap(monkeypatch)
    return run(directory, 3, settings=NARROW, pool_tokens=168, page_size=4, host_pages=300, record_logits=record)


def again(rig: Rig) -> None:
    rig.results.clear()
    rig.run({i: make_request(rig, PROMPTS[i], NEW) for i in range(len(PROMPTS))})


def test_pages_come_back_from_the_host_tier(sixes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its own part of them."""
    rig = swapped(sixes, monkeypatch)
    again(rig)
    assert rig.scheduler.stats().swapped_in > 20
    assert not rig.scheduler.stats().swap_lost
    same(rig, run(sixes, 3))


def test_what_one_rank_has_lost_is_computed_anew_by_all(sixes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = swapped(sixes, monkeypatch, record=False)  # what was drawn from a lost page is thrown away
    store = GROUPS[-1].computers[1].store
    assert store is not None
    store.content[:, 5] ^= 1
    again(rig)
    assert rig.scheduler.stats().swap_lost
    assert tokens_of(rig) == tokens_of(run(sixes, 3))


def test_sequences_of_one_prompt_and_a_search(sixes: Path) -> None:
    """Pages are copied in all ranks where their ways part."""
    rigs = [make_rig(sixes, 4, settings=STEPS, dtype="float32", ranks=ranks) for ranks in (1, 3)]
    for rig in rigs:
        several = make_request(rig, PROMPTS[5], 12, temperature=1.0, seed=3, sequence_count=3)
        beams = make_request(rig, PROMPTS[6], 6, temperature=None, beam=Beam(3), sequence_count=2)
        rig.run({0: several, 1: beams})
    one, three = map(tokens_of, rigs)
    assert len(one) == 5
    assert one == three


# The comparisons above notice faults.


def test_a_sum_whose_order_depends_on_the_place_is_seen(sixes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a ring adds up: every part of the buffer begins with another rank."""

    def ring(self: SharedMemory, x: Tensor) -> Tensor:
        parts = self._exchanged(x, self._sums % 2)
        self._sums += 1
        total = x.new_zeros(x.shape)
        for row in range(len(x)):
            for i in range(len(parts)):
                total[row] += parts[(row + i) % len(parts)][row]
        return total

    monkeypatch.setattr(SharedMemory, "sum", ring)
    one, other = (run(sixes, 3, backend="reference", **kind) for kind in ({}, SCHEDULES["reversed"]))
    with pytest.raises(AssertionError):
        same(one, other)


def test_such_a_kernel_is_seen(sixes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_ring(ranks: int, add: bool) -> shared_memory.Writer:
        def write(code: Code) -> None:
            meet(code, ranks)
            rows, parts, part_bytes, row_bytes, y, y_stride, width = code.arguments(12)[5:]
            with shared_rows(code, rows) as row, code.loop(0, width, LANES) as i:
                place = y + row * y_stride + i * 4
                total = FLOAT.load(code, place) if add else code.floats(0.0)
                for rank in range(ranks):
                    part = parts + (row + rank) % ranks * part_bytes
                    total = total + FLOAT.load(code, part + row * row_bytes + i * 4)
                FLOAT.store(code, total, place)

        return write

    call = SharedMemory.call

    def renamed(self: SharedMemory, name: str, *rest: Any) -> Any:
        return call(self, f"ring_{name}" if name.startswith("sum") else name, *rest)

    monkeypatch.setattr(shared_memory, "write_sum", write_ring)
    monkeypatch.setattr(SharedMemory, "call", renamed)
    one, other = (run(sixes, 3, backend="cpu", **kind) for kind in ({}, SCHEDULES["reversed"]))
    with pytest.raises(AssertionError):
        same(one, other)
