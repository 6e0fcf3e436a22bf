"""Host tier: pages in canonical form, in slots of host memory, each with a checksum.

A page is loaded only if its checksum still matches. The checksum's seed is the fingerprint of what the numbers mean. So
neither a flipped bit nor a store that another model filled can change a request's tokens.
"""

import logging
import zlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from model.attention.backend import AttentionBackend

log = logging.getLogger("quire.pages")


class Store(Protocol):
    """Memory that pages are swapped to."""

    def save(self, moves: NDArray[np.int32]) -> None: ...

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]: ...


class PageStore:
    """`Store` in host memory."""

    def __init__(
        self, attention: AttentionBackend, slots: int, page_bytes: int, fingerprint: bytes, pinned: bool
    ) -> None:
        """Allocates the slots.

        Args:
            attention: Back end whose pages are stored.
            slots: The number of slots, each for one page.
            page_bytes: Bytes of a page in canonical form.
            fingerprint: Digest of what the numbers in a page depend on: weights, KV dtype, layout.
            pinned: Allocate page-locked memory, which a GPU copies from directly.
        """
        self._attention = attention
        self.content = torch.zeros((slots, page_bytes), dtype=torch.uint8, pin_memory=pinned)
        self.checksums = np.zeros(slots, np.uint32)
        self._seed = zlib.crc32(fingerprint)

    def save(self, moves: NDArray[np.int32]) -> None:
        """Copies pages to slots.

        Args:
            moves: [n, 3] int32. Page, slot, layer group of the page; no slot twice.
        """
        pages, slots, groups = moves.T
        self.content[torch.from_numpy(slots.astype(np.int64))] = self._attention.export(pages, groups).cpu()
        self.checksums[slots] = [self._checksum(slot) for slot in slots.tolist()]

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]:
        """Copies slots to pages.

        Args:
            moves: [n, 3] int32. Slot, page, layer group of the page; no page twice.

        Returns:
            [m] int32. Pages that were not loaded, since the content of their slots does not match its checksum.
        """
        intact = np.array([self._checksum(slot) == self.checksums[slot] for slot in moves[:, 0].tolist()], np.bool_)
        slots, pages, groups = moves[intact].T
        if len(pages):
            self._attention.import_pages(pages, groups, self.content[torch.from_numpy(slots.astype(np.int64))])
        if not intact.all():
            log.warning("host slots %s do not hold what was put there", moves[~intact, 0].tolist())
        return moves[~intact, 1]

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self.content[slot].numpy().data, self._seed)
