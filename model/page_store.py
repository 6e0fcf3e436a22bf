"""Host tier: pages in canonical form, in slots of host memory, each with a checksum.

A page is loaded only if its checksum still matches. The checksum's seed is the fingerprint of what the numbers mean. So
neither a flipped bit nor a store that another model filled can change a request's tokens.

Moves of pages take memory of the device beside the pool, so they are made in parts of bounded size. A part for which
there is no memory is lost: its pages are computed again, and nothing else is.

A save returns when its copies are started. Threads wait for them and compute the checksums, in host memory and after
arrival, while the engine goes on. A load waits for the saves of its own slots alone.
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from model.attention.backend import AttentionBackend
from model.host_copies import CpuCopies, HostCopies
from model.host_memory import HostMemory, PageLocking

log = logging.getLogger("quire.pages")

PART_BYTES = 2**25  # bytes of pages that are moved at once, at least one page
UNDER_WAY = 4  # parts on their way to the host, at most: each holds memory of the device
CHECKERS = min(4, os.cpu_count() or 1)  # threads that check pages: one reads a fraction of what a GPU copies meanwhile

Number = TypeVar("Number", bound=np.generic)


def parts_of(moves: NDArray[Number], page_bytes: int) -> Iterator[NDArray[Number]]:
    """Yields moves of pages, one each along the first axis, in parts of at most `PART_BYTES`."""
    size = max(1, PART_BYTES // page_bytes)
    for start in range(0, len(moves), size):
        yield moves[start : start + size]


def copy_or_lose(attention: AttentionBackend, copies: NDArray[np.int32]) -> NDArray[np.int32]:
    """Copies pages to pages.

    Args:
        attention: Back end that owns the KV pool.
        copies: [n, 2] int32. Source page, target page; no page is both.

    Returns:
        [m] int32. Targets that were not copied: all, if the device lacks memory, else none.
    """
    try:
        attention.copy(copies)
    except torch.OutOfMemoryError:
        return copies[:, 1]
    return copies[:0, 1]


class Store(Protocol):
    """Memory that pages are swapped to."""

    def save(self, moves: NDArray[np.int32]) -> None: ...

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Saving:
    """Pages on their way to the host.

    Attributes:
        slots: [n] int32. Slots that they go to.
        done: Done when they have arrived and have checksums.
    """

    slots: NDArray[np.int32]
    done: Future[None]


class PageStore:
    """`Store` in host memory.

    Attributes:
        content: [slots, page_bytes] uint8.
        checksums: [slots] uint64. XXH3 of each slot's content, valid once `settle` returned.
    """

    def __init__(
        self,
        attention: AttentionBackend,
        slots: int,
        page_bytes: int,
        fingerprint: bytes,
        locking: PageLocking | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        """Allocates the slots.

        Args:
            attention: Back end whose pages are stored.
            slots: The number of slots, each for one page.
            page_bytes: Bytes of a page in canonical form.
            fingerprint: Digest of what the numbers in a page depend on: weights, KV dtype, layout.
            locking: Locks the memory's pages, so that a GPU copies from them directly. None on a CPU.
            copies: Copies between the pool's device and the memory. None on a CPU.
        """
        self._attention, self._memory = attention, HostMemory(slots * page_bytes, locking)
        self._copies = CpuCopies() if copies is None else copies
        self.content = self._memory.content.view(slots, page_bytes)
        self.checksums = np.zeros(slots, np.uint64)
        self._filled = np.zeros(slots, np.bool_)  # whether the slot's pages have arrived and have a checksum
        self._page_bytes, self._seed = page_bytes, xxhash.xxh3_64_intdigest(fingerprint)
        self._savings = list[_Saving]()  # oldest first
        # Checks have threads of their own: those of savings wait for the device.
        self._savers = ThreadPoolExecutor(UNDER_WAY, "quire-page-saver")
        self._checkers = ThreadPoolExecutor(CHECKERS, "quire-page-checker")

    def save(self, moves: NDArray[np.int32]) -> None:
        """Starts copying pages to slots. `load` reports pages as lost for which the device lacked memory here.

        Work on the current stream that is launched from then on may overwrite the pages.

        Args:
            moves: [n, 3] int32. Page, slot, layer group of the page; no slot twice.
        """
        self._arrive(moves[:, 1])
        self._filled[moves[:, 1]] = False
        lacking = 0
        for part in parts_of(moves[np.argsort(moves[:, 1])], self._page_bytes):
            while len(self._savings) >= UNDER_WAY:
                self._savings.pop(0).done.result()
            pages, slots, groups = part.T
            try:
                arrived = self._copies.to_host(self._attention.export(pages, groups), self.content, slots)
            except torch.OutOfMemoryError:
                lacking += len(pages)
                continue
            self._savings.append(_Saving(slots, self._savers.submit(self._fill, arrived, slots)))
        if lacking:
            log.warning("out of memory: %d of %d pages were not saved, they are lost", lacking, len(moves))

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]:
        """Copies slots to pages. Checksums are compared while the copies run, and before a page is written.

        Args:
            moves: [n, 3] int32. Slot, page, layer group of the page; no page twice.

        Returns:
            [m] int32. Pages that were not loaded: nothing arrived in their slots, the content there does not match its
                checksum, or the device lacks memory.
        """
        self._arrive(moves[:, 0])
        filled = self._filled[moves[:, 0]]
        lost, damaged, lacking = [moves[~filled, 1]], list[int](), 0
        moving = moves[filled]
        for part in parts_of(moving[np.argsort(moving[:, 0])], self._page_bytes):
            slots, pages, groups = part.T
            intact = np.ones(len(slots), np.bool_)
            try:
                arriving = self._copies.to_device(self.content, slots)
                intact = self._intact(slots)
                # Always: memory of the copy is not free before it is done.
                content = arriving()
                if not intact.all():
                    content = content[torch.from_numpy(np.flatnonzero(intact)).to(content.device)]
                if intact.any():
                    self._attention.import_pages(pages[intact], groups[intact], content)
            except torch.OutOfMemoryError:
                lost.append(pages[intact])
                lacking += int(np.count_nonzero(intact))
            damaged += slots[~intact].tolist()
            lost.append(pages[~intact])
        if damaged:
            log.warning("host slots %s do not hold what was put there", damaged)
        if lacking:
            log.warning("out of memory: %d of %d pages were not loaded, they are computed anew", lacking, len(moves))
        return np.concatenate(lost)

    def settle(self) -> None:
        """Waits until all saved pages have arrived and have checksums."""
        while self._savings:
            self._savings.pop(0).done.result()

    def close(self) -> None:
        """Waits for all copies and unlocks the memory. No page is saved or loaded any more."""
        self._savers.shutdown()
        self._checkers.shutdown()
        self._copies.wait()
        self._memory.close()

    def _arrive(self, slots: NDArray[np.int32]) -> None:
        """Waits for what is on its way to some of the slots."""
        under_way = list[_Saving]()
        for saving in self._savings:
            if saving.done.done() or np.isin(slots, saving.slots).any():
                saving.done.result()
            else:
                under_way.append(saving)
        self._savings = under_way

    def _fill(self, arrived: Callable[[], None], slots: NDArray[np.int32]) -> None:
        """Gives slots their checksums when their content has arrived."""
        arrived()
        self.checksums[slots] = [self._checksum(slot) for slot in slots.tolist()]
        self._filled[slots] = True

    def _intact(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns for each slot whether its content matches its checksum."""
        shares = np.array_split(slots, min(CHECKERS, len(slots)))
        return np.concatenate(list(self._checkers.map(self._matches, shares)))

    def _matches(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.array([self._checksum(slot) == self.checksums[slot] for slot in slots.tolist()], np.bool_)

    def _checksum(self, slot: int) -> int:
        """Returns the checksum of what is in a slot. The hash releases the interpreter's lock."""
        return xxhash.xxh3_64_intdigest(self.content[slot].numpy().data, self._seed)
