"""Law: a page move for which the device lacks memory costs computing its pages again, and changes no bit.

Moves take memory beside the pool: on a GPU they copy pages to contiguous memory first.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_manager.layout import KVLayout
from model import page_store
from model.page_moves import PageMoves
from model.page_store import PageStore
from model.reference.attention_backend import ReferenceAttention
from scheduler.events import Submit
from scheduler.settings import SchedulerSettings
from tests.model.test_host_tier import NEW, PLAIN, check, pressed
from tests.model.test_moves import pages_of, write
from tests.model.test_parity import random_prompts
from tests.support.engines import GROUPS, Rig, make_request, make_rig
from tests.support.planted import plant
from tests.support.swaps import always_swap

pytestmark = pytest.mark.sample(3)

PIPELINED = SchedulerSettings(24, 4, 8, 2, backfill_time=0.0)
SCHEDULINGS = pytest.mark.parametrize("scheduling", [PLAIN, PIPELINED], ids=["one in flight", "two in flight"])


def lacks_memory(every: int) -> Callable[[Any], Any]:
    """Stands in for a move: each `every`-th call raises, the others move."""
    calls = count(1)

    def stand_in(real: Any) -> Any:
        def move(*args: Any) -> Any:
            if next(calls) % every == 0:
                raise torch.OutOfMemoryError("planted")
            return real(*args)

        return move

    return stand_in


@pytest.fixture(autouse=True)
def _pages_move_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_store, "PART_BYTES", 1)


@pytest.fixture
def prompts() -> list[list[int]]:
    head, other = random_prompts([48, 40], seed=41)
    return [head + tail for tail in random_prompts([3, 9, 30, 70], seed=42)] + [other, head * 3]


def alone(directory: Path, prompts: Sequence[list[int]], **sampling: Any) -> Rig:
    rig = make_rig(directory, record_logits=True, prefix_cache=False)
    for i, prompt in enumerate(prompts):
        rig.run({i: make_request(rig, prompt, NEW, **sampling)})
    return rig


@SCHEDULINGS
@pytest.mark.parametrize("move", ["export", "import_pages"])
def test_swaps(
    tiny: Path, prompts: list[list[int]], move: str, scheduling: SchedulerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_swap(monkeypatch)
    expected = alone(tiny, prompts)
    plant(monkeypatch, type(expected.loaded.runner.attention), move, lacks_memory(3))
    rig = pressed(tiny, prompts, 4, 200, scheduling, record=False)
    check(expected, rig, prompts)
    stats = rig.scheduler.stats()
    assert stats.swap_lost
    assert stats.swapped_in > stats.swap_lost


@SCHEDULINGS
def test_copies_of_pages_that_sequences_share(
    tiny: Path, prompts: list[list[int]], scheduling: SchedulerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of a request share the page that their prompt ends in until they write into it."""

    def run() -> Rig:
        rig = make_rig(tiny, 4, 1024, scheduling)
        how = {"temperature": 1.0, "seed": 5, "sequence_count": 3}
        rig.run({i: make_request(rig, prompt, NEW, **how) for i, prompt in enumerate(prompts[:3])})
        return rig

    expected = run()
    plant(monkeypatch, type(expected.loaded.runner.attention), "copy", lacks_memory(2))
    rig = run()
    assert {i: r.tokens for i, r in rig.results.items()} == {i: r.tokens for i, r in expected.results.items()}
    assert rig.scheduler.stats().preemptions > expected.scheduler.stats().preemptions


@pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "sockets"])
@pytest.mark.parametrize("lacking", [(0,), (1,), (0, 1)], ids=str)
def test_copies_for_which_a_rank_lacks_memory(
    tiny: Path, prompts: list[list[int]], lacking: tuple[int, ...], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks lose the same pages, and go on."""

    def run(lacking: tuple[int, ...]) -> Rig:
        rig = make_rig(tiny, 4, 1024, PLAIN, ranks=2, apart=apart)
        rig.run({9: make_request(rig, prompts[4], 1)})  # by then the follower has loaded
        attentions = [rig.loaded.runner.attention.own, GROUPS[-1].computers[1].attention]
        for rank in lacking:
            plant(monkeypatch, attentions[rank], "copy", lacks_memory(2 + rank))
        how = {"temperature": 1.0, "seed": 5, "sequence_count": 3}
        rig.run({i: make_request(rig, prompt, NEW, **how) for i, prompt in enumerate(prompts[:3])})
        return rig

    expected, rig = run(()), run(lacking)
    assert {i: r.tokens for i, r in rig.results.items()} == {i: r.tokens for i, r in expected.results.items()}
    assert rig.scheduler.stats().preemptions > expected.scheduler.stats().preemptions


@pytest.mark.parametrize("kind", ["windows", "qwen3.5"])
def test_pages_of_another_engine(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(kind, tmp_path)
    prompts = random_prompts([70, 33, 90], seed=51)
    first, second = make_rig(directory, 4, 1024), make_rig(directory, 4, 1024)
    expected = alone(directory, prompts)
    first.run({i: make_request(first, prompt, NEW) for i, prompt in enumerate(prompts)})
    asked = [Submit(i, make_request(second, prompt, NEW), again=True) for i, prompt in enumerate(prompts)]
    plant(monkeypatch, type(expected.loaded.runner.attention), "import_pages", lacks_memory(7))
    second.play({0: [replace(submit, transferred=pages_of(first, submit)) for submit in asked]})
    check(expected, second, prompts)
    assert second.scheduler.stats().preemptions > 0
    assert second.scheduler.stats().pages_transferred


@pytest.mark.parametrize("kind", ["llama", "windows", "qwen3.5"])
@pytest.mark.parametrize("every", [1, 5, 1000])
def test_pages_for_another_engine(
    tmp_path: Path, kind: str, every: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets those before the first that does not fit and computes the others; the engine that has them serves on."""
    directory = write(kind, tmp_path)
    prompts = random_prompts([70, 33, 90], seed=51)
    first, second, expected = make_rig(directory, 4, 1024), make_rig(directory, 4, 1024), alone(directory, prompts)
    first.run({i: make_request(first, prompt, NEW) for i, prompt in enumerate(prompts)})
    asked = [Submit(i, make_request(second, prompt, NEW), again=True) for i, prompt in enumerate(prompts)]
    plant(monkeypatch, type(expected.loaded.runner.attention), "export", lacks_memory(every))
    with caplog.at_level(logging.WARNING, "quire.pages"):
        second.play({0: [replace(submit, transferred=pages_of(first, submit)) for submit in asked]})
    check(expected, second, prompts)
    # The pages of windows and states that a sequence goes on from are the last ones: without them none is of use.
    assert bool(second.scheduler.stats().pages_transferred) == (every == 1000 or (every == 5 and kind == "llama"))
    assert bool(caplog.records) == (every < 1000)
    again = first.run({9: make_request(first, prompts[0], NEW)})
    assert again[9].tokens == expected.results[0].tokens


def test_what_does_not_fit_is_told_once_a_move(caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout.uniform(((0, 1),), 2, 6, 4, 5)
    attention = ReferenceAttention(layout, 9, 4, "float32", torch.device("cpu"))
    store = PageStore(attention, 4, layout.page_bytes, b"model")
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, attention, "export", lacks_memory(1))
        with caplog.at_level(logging.WARNING, "quire.pages"):
            store.save(np.array([[7, 0, 0], [2, 3, 0]], np.int32))
    assert [record.message for record in caplog.records] == [
        "out of memory: 2 of 2 pages were not saved, they are lost"
    ]
    store.save(np.array([[7, 3, 0]], np.int32))
    assert store.load(np.array([[0, 1, 0], [3, 2, 0]], np.int32)).tolist() == [1], "slot 0 has nothing that arrived"
    store.save(np.array([[7, 0, 0], [7, 1, 0]], np.int32))
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, attention, "import_pages", lacks_memory(2))
        loads = np.array([[0, 1, 0], [2, 5, 0], [1, 4, 0], [3, 6, 0]], np.int32)
        with caplog.at_level(logging.WARNING, "quire.pages"):
            assert sorted(store.load(loads).tolist()) == [4, 5]
    assert [record.message for record in caplog.records] == [
        "out of memory: 1 of 4 pages were not loaded, they are computed anew"
    ]
    caplog.clear()
    moves = PageMoves(attention, layout, 9, False, None)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, attention, "export", lacks_memory(3))
        with caplog.at_level(logging.WARNING, "quire.pages"):
            assert len(moves.export(np.arange(5, dtype=np.int32))) == 2
    assert [record.message for record in caplog.records] == [
        "out of memory: 3 of 5 pages are not available to another engine, which computes them"
    ]


@pytest.mark.parametrize(("bytes_of_part", "calls"), [(1, 5), (2, 3), (5, 1), (100, 1)])
def test_moves_are_made_in_parts_of_bounded_size(
    bytes_of_part: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store, "PART_BYTES", 10 * bytes_of_part)
    parts = list(page_store.parts_of(np.arange(5), 10))
    assert len(parts) == calls
    assert np.concatenate(parts).tolist() == [0, 1, 2, 3, 4]
