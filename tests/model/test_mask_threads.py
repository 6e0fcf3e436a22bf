"""Threads that compute masks: which thread computes one changes nothing but the time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.structured import mask_threads
from model.structured.mask_threads import MaskThreads
from tests.model.test_parity import random_prompts
from tests.model.test_structured_output import SCHEMA, constrained, llama, run, searches_have_time
from tests.support.engines import make_rig

__all__ = ["llama", "searches_have_time"]  # fixtures


@pytest.fixture(autouse=True)
def others_are_woken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "WORTH", 0.0)


@contextmanager
def opened(threads: int) -> Iterator[MaskThreads]:
    made = MaskThreads(threads)
    try:
        yield made
    finally:
        made.close()


@given(threads=st.integers(1, 5), items=st.lists(st.integers(-3, 9), max_size=12))
def test_results_are_in_order_and_the_first_fault_is_raised_when_all_have_ended(threads: int, items: list[int]) -> None:
    called = list[int]()

    def call(item: int) -> int:
        called.append(item)
        if item < 0:
            raise ValueError(item)
        return item * item

    with opened(threads) as made:
        if faults := [item for item in items if item < 0]:
            with pytest.raises(ValueError, match=f"^{faults[0]}$"):
                made.map(call, items, [item % 3 for item in items])
        else:
            assert made.map(call, items, [item % 3 for item in items]) == [item * item for item in items]
    assert sorted(called) == sorted(items)


def test_calls_run_at_the_same_time() -> None:
    """Each waits for the others: one thread alone would wait for ever."""
    together = threading.Barrier(3, timeout=60)
    with opened(3) as made:
        assert sorted(made.map(lambda _: together.wait(), range(3), [0, 1, 1])) == [0, 1, 2]


def test_one_call_stays_on_the_callers_thread() -> None:
    with opened(4) as made:
        assert made.map(lambda _: threading.get_ident(), [0], [0]) == [threading.get_ident()]


def test_a_thread_takes_what_waits_for_no_other_first() -> None:
    """Two locks, and two threads: each call waits until one of the other lock runs."""
    running = [threading.Semaphore(0), threading.Semaphore(0)]

    def call(lock: int) -> bool:
        running[lock].release()
        return running[1 - lock].acquire(timeout=60)

    with opened(2) as made:
        assert all(made.map(call, [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]))


def test_short_calls_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "WORTH", 60.0)
    with opened(4) as made:
        assert set(made.map(lambda _: threading.get_ident(), range(100), [0] * 100)) == {threading.get_ident()}


def test_the_time_of_a_call_is_that_of_its_thread() -> None:
    """As limits of one output's masks are of processor time: a mask pays for no other."""

    def call(busy: bool) -> float:
        began = time.thread_time()
        while busy and time.thread_time() - began < 0.05:
            pass
        return time.thread_time() - began

    with opened(2) as made:
        short, long = made.map(call, [False, True], [0, 1])
    assert short < 0.05 <= long


def test_outputs_are_those_of_one_thread(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows under constraints, drawn at a temperature."""
    used = set[str]()
    taken = MaskThreads.map

    def run_with(threads: int) -> object:
        def counted(self: MaskThreads, call: object, items: object, locks: object) -> object:
            def on_thread(item: object) -> object:
                used.add(threading.current_thread().name.split("_")[0])
                return call(item)  # type: ignore[operator]

            self.count, self._others = threads, threads - 1
            return taken(self, on_thread, items, locks)  # type: ignore[arg-type]

        monkeypatch.setattr(MaskThreads, "map", counted)
        rig = make_rig(llama)
        prompts = random_prompts([5, 9, 3, 11, 7, 4, 8, 6], seed=2)
        return run(rig, {i: constrained(rig, p, SCHEMA, temperature=1.5, seed=i) for i, p in enumerate(prompts)})

    alone = run_with(1)
    assert used == {threading.current_thread().name.split("_")[0]}
    assert run_with(4) == alone
    assert "quire-masks" in used
