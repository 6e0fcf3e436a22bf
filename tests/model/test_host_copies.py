"""Saves go on beside the engine: what is on its way to a slot is neither read, nor mixed with what goes there next."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model import page_store
from model.host_copies import CpuCopies, runs_of
from model.page_store import PageStore
from model.reference.attention_backend import ReferenceAttention
from tests.support.pages import exported, imported

LAYOUT = KVLayout.uniform(((0, 1, 2),), 2, 6, 4, 5)
CPU = torch.device("cpu")


@dataclass
class LateCopies:
    """Copies to the host that are made when somebody lets them, in any thread."""

    let: Event = field(default_factory=Event)
    waited: Event = field(default_factory=Event)

    def to_host(self, content: Tensor, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], None]:
        def arrive() -> None:
            self.waited.set()
            assert self.let.wait(30)
            CpuCopies().to_host(content, host, slots)

        return arrive

    def to_device(self, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], Tensor]:
        return CpuCopies().to_device(host, slots)

    def wait(self) -> None:
        pass


def filled() -> ReferenceAttention:
    attention = ReferenceAttention(LAYOUT, 9, 4, "float32", CPU)
    imported(attention, range(9), torch.randint(0, 256, (9, LAYOUT.page_bytes), dtype=torch.uint8))
    return attention


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_are_all_places_and_slots_in_order(slots: list[int]) -> None:
    runs = list(runs_of(np.array(slots, np.int32)))
    assert [place for places, _ in runs for place in range(places.start, places.stop)] == list(range(len(slots)))
    assert [slot for _, run in runs for slot in range(run.start, run.stop)] == slots
    assert all(one.stop != other.start for (_, one), (_, other) in pairwise(runs))


def test_a_save_returns_before_its_copies_are_done_and_its_pages_may_be_overwritten() -> None:
    attention, copies = filled(), LateCopies()
    before = exported(attention, range(9))
    store = PageStore(attention, 4, LAYOUT.page_bytes, b"model", copies=copies)
    store.save(np.array([[7, 0, 0], [2, 3, 0]], np.int32))
    assert copies.waited.wait(30)
    attention.poison(np.array([7, 2], np.int32))
    assert store.load(np.array([[1, 5, 0]], np.int32)).tolist() == [5], "slots that no save fills are not waited for"
    copies.let.set()
    assert not len(store.load(np.array([[3, 2, 0], [0, 7, 0]], np.int32)))
    assert torch.equal(exported(attention, range(9)), before)
    store.close()


def test_a_slot_that_is_saved_again_has_the_last_page() -> None:
    attention, copies = filled(), LateCopies()
    copies.let.set()
    store = PageStore(attention, 2, LAYOUT.page_bytes, b"model", copies=copies)
    for page in range(8):
        store.save(np.array([[page, page % 2, 0]], np.int32))
    assert not len(store.load(np.array([[1, 8, 0]], np.int32)))
    first, last = exported(attention, [7, 8])
    assert torch.equal(first, last)
    store.close()


def test_few_parts_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds memory of the device."""
    monkeypatch.setattr(page_store, "PART_BYTES", 1)
    started, done, most = [0], [0], [0]

    class Counted(CpuCopies):
        def to_host(self, content: Tensor, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], None]:
            arrived = super().to_host(content, host, slots)
            started[0] += 1
            most[0] = max(most[0], started[0] - done[0])

            def arrive() -> None:
                arrived()
                done[0] += 1

            return arrive

    attention = filled()
    store = PageStore(attention, 9, LAYOUT.page_bytes, b"model", copies=Counted())
    store.save(np.column_stack((np.arange(9), np.arange(9)[::-1], np.zeros(9))).astype(np.int32))
    store.settle()
    assert (started, done) == ([9], [9])
    assert most[0] <= page_store.UNDER_WAY + 1
    store.close()


def test_a_failed_copy_is_raised() -> None:
    class Failing(CpuCopies):
        def to_host(self, content: Tensor, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], None]:
            def arrive() -> None:
                raise RuntimeError("planted")

            return arrive

    store = PageStore(filled(), 2, LAYOUT.page_bytes, b"model", copies=Failing())
    store.save(np.array([[7, 0, 0]], np.int32))
    with pytest.raises(RuntimeError, match="planted"):
        store.load(np.array([[0, 1, 0]], np.int32))
    store.close()
