"""The bytes of the host tier: pages in canonical form, in slots of host memory, each with a checksum.

A page comes back only if its checksum is still right, which covers the fingerprint of what its numbers mean: so neither
a flipped bit nor a store that another model filled can become somebody's tokens.
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
    """Where pages are swapped to."""

    def save(self, moves: NDArray[np.int32]) -> None: ...

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]: ...


class PageStore:
    """`slots` places for pages of `attention`, in memory that a GPU copies from directly if there is one. fingerprint:
    what the numbers in a page depend on: weights, KV dtype, layout.
    """

    def __init__(
        self, attention: AttentionBackend, slots: int, page_bytes: int, fingerprint: bytes, pinned: bool
    ) -> None:
        self._attention = attention
        self._content = torch.zeros((slots, page_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._checksums = np.zeros(slots, np.uint32)
        self._seed = zlib.crc32(fingerprint)

    def save(self, moves: NDArray[np.int32]) -> None:
        """moves: [n, 2] of page, slot; no slot twice."""
        slots = moves[:, 1]
        self._content[torch.from_numpy(slots.astype(np.int64))] = self._attention.export(moves[:, 0]).cpu()
        self._checksums[slots] = [self._checksum(slot) for slot in slots.tolist()]

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]:
        """moves: [n, 2] of slot, page; no page twice. Returns the pages that stay as they are, since what their slots
        hold is not what was put there.
        """
        intact = np.array([self._checksum(slot) == self._checksums[slot] for slot in moves[:, 0].tolist()], np.bool_)
        slots, pages = moves[intact].T
        if len(pages):
            self._attention.import_pages(pages, self._content[torch.from_numpy(slots.astype(np.int64))])
        if not intact.all():
            log.warning("host slots %s do not hold what was put there", moves[~intact, 0].tolist())
        return moves[~intact, 1]

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self._content[slot].numpy().data, self._seed)
