"""Host memory has the size that was asked for, and is page-locked while it is used, where CUDA can."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import loading
from model.host_memory import HostMemory, PageLocking
from tests.support.engines import make_request, make_rig
from tests.support.planted import plant
from tests.support.swaps import always_swap

TOO_MUCH = 2  # CUDA's code of a lack of memory


class FakeCudart:
    """Stands for CUDA's runtime. locked: sizes by address. stale: an error that no launch has reported."""

    def __init__(self, code: int = 0, last: int = 0) -> None:
        """code: of locking. last: of unlocking."""
        self._code, self._last = code, last
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        self.stale = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append("lock")
        assert (address not in self.locked, flags) == (True, 0)
        self.stale |= self._code != 0
        if not self._code:
            self.locked[address] = size
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append("unlock")
        del self.locked[address]
        self.stale |= self._last != 0
        return self._last

    def launch(self) -> None:
        if self.stale:
            self.stale = False
            raise RuntimeError("CUDA error: out of memory")

    @property
    def locking(self) -> PageLocking:
        return PageLocking(self, self.launch)


@given(st.integers(1, 3 * 2**20))
def test_exactly_the_size_that_was_asked_for_is_locked(size: int) -> None:
    cudart = FakeCudart()
    memory = HostMemory(size, cudart.locking)
    assert cudart.locked == {memory.content.data_ptr(): size}
    assert (memory.content.shape, memory.content.dtype) == ((size,), torch.uint8)
    assert not memory.content.any()
    memory.content.fill_(7)
    memory.close()
    memory.close()
    assert (cudart.locked, cudart.calls) == ({}, ["lock", "unlock"])


def test_memory_that_cannot_be_locked_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    cudart = FakeCudart(TOO_MUCH)
    with caplog.at_level(logging.WARNING):
        memory = HostMemory(4096, cudart.locking)
    assert "4096 bytes of host memory cannot be page-locked (CUDA error 2)" in caplog.text
    memory.content.fill_(7)
    memory.close()
    assert cudart.calls == ["lock"], "what is not locked is not unlocked"
    assert not cudart.stale, "no later launch raises the error"


def test_memory_that_cannot_be_unlocked_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    cudart = FakeCudart(last=TOO_MUCH)
    with caplog.at_level(logging.WARNING):
        HostMemory(4096, cudart.locking).close()
    assert "4096 bytes of host memory stay page-locked (CUDA error 2)" in caplog.text
    assert not cudart.stale


def test_memory_is_unlocked_when_nothing_uses_it_any_more() -> None:
    cudart = FakeCudart()
    HostMemory(4096, cudart.locking)
    gc.collect()
    assert (cudart.locked, cudart.calls) == ({}, ["lock", "unlock"])


def test_without_a_gpu_nothing_is_locked() -> None:
    memory = HostMemory(100, None)
    assert not memory.content.any()
    memory.close()


def test_a_tier_is_locked_from_the_load_to_the_end_of_its_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots take what its pages take: no more is locked."""
    cudart = FakeCudart()
    always_swap(monkeypatch)
    plant(monkeypatch, loading, "PageStore", lambda store: lambda *rest: store(*rest[:4], cudart.locking))
    rig = make_rig(tiny, 4, 64, host_pages=19)
    rig.run({0: make_request(rig, list(range(1, 11)), 1)})
    assert list(cudart.locked.values()) == [19 * rig.loaded.layout.page_bytes]
    rig.loaded.runner.close()
    assert (cudart.locked, cudart.calls) == ({}, ["lock", "unlock"])
