"""Host tier: pages in canonical form, in slots of host memory, each with a checksum.

A page is loaded only if its checksum still matches. The checksum's seed is the fingerprint of what the numbers mean. So
neither a flipped bit nor a store that another model filled can change a request's tokens.

Moves of pages take memory of the device beside the pool, so they are made in parts of bounded size. A part for which
there is no memory is lost: its pages are computed again, and nothing else is.
"""

import logging
import zlib
from collections.abc import Iterator
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from model.attention.backend import AttentionBackend
from model.host_memory import HostMemory, PageLocking

log = logging.getLogger("quire.pages")

PART_BYTES = 2**26  # bytes of pages that are moved at once, at least one page

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


class PageStore:
    """`Store` in host memory."""

    def __init__(
        self,
        attention: AttentionBackend,
        slots: int,
        page_bytes: int,
        fingerprint: bytes,
        locking: PageLocking | None = None,
    ) -> None:
        """Allocates the slots.

        Args:
            attention: Back end whose pages are stored.
            slots: The number of slots, each for one page.
            page_bytes: Bytes of a page in canonical form.
            fingerprint: Digest of what the numbers in a page depend on: weights, KV dtype, layout.
            locking: Locks the memory's pages, so that a GPU copies from them directly. None on a CPU.
        """
        self._attention, self._memory = attention, HostMemory(slots * page_bytes, locking)
        self.content = self._memory.content.view(slots, page_bytes)
        self.checksums = np.zeros(slots, np.uint32)
        self._filled = np.zeros(slots, np.bool_)  # what is moved there has arrived
        self._page_bytes, self._seed = page_bytes, zlib.crc32(fingerprint)

    def save(self, moves: NDArray[np.int32]) -> None:
        """Copies pages to slots. Those for which the device lacks memory are told as lost by `load`.

        Args:
            moves: [n, 3] int32. Page, slot, layer group of the page; no slot twice.
        """
        self._filled[moves[:, 1]] = False
        for part in parts_of(moves, self._page_bytes):
            pages, slots, groups = part.T
            try:
                content = self._attention.export(pages, groups).cpu()
            except torch.OutOfMemoryError:
                continue
            self.content[torch.from_numpy(slots.astype(np.int64))] = content
            self.checksums[slots] = [self._checksum(slot) for slot in slots.tolist()]
            self._filled[slots] = True
        if lacking := np.count_nonzero(~self._filled[moves[:, 1]]):
            log.warning("out of memory: %d of %d pages were not saved, they are lost", lacking, len(moves))

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]:
        """Copies slots to pages.

        Args:
            moves: [n, 3] int32. Slot, page, layer group of the page; no page twice.

        Returns:
            [m] int32. Pages that were not loaded: nothing arrived in their slots, the content there does not match its
                checksum, or the device lacks memory.
        """
        filled = moves[self._filled[moves[:, 0]]]
        intact = np.array([self._checksum(slot) == self.checksums[slot] for slot in filled[:, 0].tolist()], np.bool_)
        if not intact.all():
            log.warning("host slots %s do not hold what was put there", filled[~intact, 0].tolist())
        lost, lacking = [moves[~np.isin(moves[:, 1], filled[intact, 1]), 1]], 0
        for part in parts_of(filled[intact], self._page_bytes):
            slots, pages, groups = part.T
            try:
                self._attention.import_pages(pages, groups, self.content[torch.from_numpy(slots.astype(np.int64))])
            except torch.OutOfMemoryError:
                lost.append(pages)
                lacking += len(pages)
        if lacking:
            log.warning("out of memory: %d of %d pages were not loaded, they are computed anew", lacking, len(moves))
        return np.concatenate(lost)

    def close(self) -> None:
        """Unlocks the memory. No page is saved or loaded any more."""
        self._memory.close()

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self.content[slot].numpy().data, self._seed)
