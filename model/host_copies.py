"""Copies of pages between a device and slots of host memory, one copy for each run of slots that follow each other.

On a GPU copies have streams of their own, one for each direction, so they overlap with a step's kernels and with each
other. Events keep the order: a copy to the host starts when its source is complete, pages are imported when they have
arrived, and a slot is overwritten when earlier copies have read it.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopies(Protocol):
    """Copies between a device and host memory [slots, page_bytes] uint8. One thread starts them."""

    def to_host(self, content: Tensor, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], None]:
        """Starts copying pages to slots, after earlier copies from the same slots.

        Args:
            content: [n, page_bytes] uint8 on the device. The caller does not write it any more.
            host: Host memory.
            slots: [n] int32. No slot twice.

        Returns:
            A function that waits until the pages are in host memory. Any thread may call it.
        """

    def to_device(self, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], Tensor]:
        """Starts copying slots to new memory of the device. Call it when earlier copies to these slots are done.

        Args:
            host: Host memory. No slot is written by the CPU before the copy is done.
            slots: [n] int32.

        Returns:
            A function that returns the pages, [n, page_bytes] uint8. Work launched after that call may read them.

        Raises:
            torch.OutOfMemoryError: The device lacks memory.
        """

    def wait(self) -> None:
        """Waits for all copies."""


def runs_of(slots: NDArray[np.int32]) -> Iterator[tuple[slice, slice]]:
    """Yields runs of slots that follow each other: their places among all, and the slots."""
    ends = np.flatnonzero(np.diff(slots) != 1) + 1
    for start, end in pairwise([0, *ends.tolist(), len(slots)] if len(slots) else []):
        first = int(slots[start])
        yield slice(start, end), slice(first, first + end - start)


class CpuCopies:
    """`HostCopies` for pages in the CPU's memory. They are done when the call returns."""

    def to_host(self, content: Tensor, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], None]:
        for places, run in runs_of(slots):
            host[run].copy_(content[places])
        return _nothing

    def to_device(self, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], Tensor]:
        runs = [run for _, run in runs_of(slots)]
        # A run is read where it is: the pool copies it anyway.
        pages = host[runs[0]] if len(runs) == 1 else torch.cat([host[run] for run in runs])
        return lambda: pages

    def wait(self) -> None:
        """Returns at once."""


class CudaCopies:
    """`HostCopies` for a GPU. They run beside its work where the host's memory is page-locked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))

    def to_host(self, content: Tensor, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], None]:
        self._out.wait_stream(torch.cuda.current_stream(self._device))  # which computes the content
        self._out.wait_stream(self._in)  # which may still read the slots
        with torch.cuda.stream(self._out):
            for places, run in runs_of(slots):
                host[run].copy_(content[places], non_blocking=True)
            # A blocking event: the thread that waits for it sleeps, and does not spin beside the step's thread.
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._out)
        content.record_stream(self._out)  # its memory is not used again before the copy is done
        return arrived.synchronize

    def to_device(self, host: Tensor, slots: NDArray[np.int32]) -> Callable[[], Tensor]:
        with torch.cuda.stream(self._in):
            # Allocated on this stream, so that the copy waits for no kernel of the step that used the memory before.
            pages = torch.empty((len(slots), host.shape[1]), dtype=torch.uint8, device=self._device)
            for places, run in runs_of(slots):
                pages[places].copy_(host[run], non_blocking=True)

        def arrived() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._in)
            pages.record_stream(current)
            return pages

        return arrived

    def wait(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


def _nothing() -> None:
    """Waits for a copy that is done already."""
