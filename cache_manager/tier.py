"""Books of the host tier: the evicted pages with a copy in host memory, and the slots of each copy.

Pages that are evicted for capacity are swapped out. A prompt with the same prefix has them swapped in, into pages of
its own. Copies are found by block hash and confirmed by content and parent hash; the prefix index confirms the pages
before them. A copy stays after its use, so another eviction of the page costs no copying. The least recently used copy
is dropped first.

Invariant: the predecessor of each copy is published or has a copy too. A copy without its predecessor cannot be found,
so it is dropped.

Slots are numbers here: `model.page_store` has their bytes and checks them. A tier below this one, such as a disk, could
be addressed by the same block hashes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.block_hash import HASH_BYTES, BlockHash, HashChain
from cache_manager.changes import PageChanges
from cache_manager.prefix import NONE, PrefixIndex

FIRST = bytes(HASH_BYTES)
"""Parent hash of the first page of a sequence."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of a node's pages in host memory.

    Attributes:
        parent: Block hash of the page before, FIRST for the first page of a sequence.
        content: Content of the page, as in `HashChain`.
        slots: Slot of each group's page, NONE where the page had left the group's window.
    """

    parent: BlockHash
    content: bytes
    slots: tuple[int, ...]


class HostTier:
    """Copies of evicted pages in slots of host memory. Writes all its own state.

    Invariant: each slot is free, resting or in exactly one copy.

    Args:
        slots: Slots, each for one page.
        groups: Layer groups; a copy takes at most one slot for each.

    Attributes:
        slots: Number of slots.
        copies: Copies by block hash, the least recently used first.
        swapped_out: Pages whose copy to the host was planned.
        swapped_in: Pages whose copy from the host was planned.
        lost: Pages whose slot did not hold the stored content.

    Raises:
        ValueError: There are fewer slots than groups.
    """

    def __init__(self, slots: int, groups: int = 1) -> None:
        if slots < groups:
            raise ValueError(f"a host tier needs at least {groups} slots, got {slots}")
        self.slots = slots
        self.copies: dict[BlockHash, Copy] = {}
        self._free = list(range(slots - 1, -1, -1))
        # Hashes of copies, by parent hash. Keys of a dict, the oldest first: the order of a set differs between
        # processes, and slots are freed in this order.
        self._after: dict[BlockHash, dict[BlockHash, None]] = {}
        self._read: dict[BlockHash, Copy] = {}  # copies that the next plan reads
        self._resting: list[int] = []  # slots of dropped copies that the next plan still reads
        self._arriving: dict[int, list[tuple[Sequence[BlockHash], Pages]]] = {}  # step -> hashes, pages [groups, n]
        self.swapped_out = self.swapped_in = self.lost = 0

    @property
    def used(self) -> int:
        """Number of slots with a copy."""
        return self.slots - len(self._free) - len(self._resting)

    def free_slots(self) -> list[int]:
        """Returns the slots without a copy; the next plan may still read some of them."""
        return self._free + self._resting

    def slots_of(self, hashes: Sequence[BlockHash]) -> NDArray[np.int32]:
        """Returns [groups, n] the slots of n copies, NONE where a page had left its group's window."""
        return np.array([self.copies[block_hash].slots for block_hash in hashes], np.int32).T

    def find(self, chain: HashChain, start: int, most: int) -> list[BlockHash]:
        """Finds consecutive pages of a chain that have copies.

        Args:
            chain: Block hashes and contents of a sequence.
            start: Index of the first page to look for.
            most: Index of the page to end before.

        Returns:
            Block hashes of the pages from `start` on, up to the first without a copy.
        """
        found = list[BlockHash]()
        parent = chain.hashes[start - 1] if start else FIRST
        for block_hash, content in zip(chain.hashes[start:most], chain.contents[start:most], strict=True):
            copy = self.copies.get(block_hash)
            if copy is None or copy.content != content or copy.parent != parent:
                break
            found.append(block_hash)
            parent = block_hash
        return found

    def keep(self, index: PrefixIndex, run: Sequence[int], new: bool = True) -> list[tuple[int, int]]:
        """Keeps the pages of nodes that were just evicted.

        Args:
            index: The prefix index; the nodes are removed from it and still readable.
            run: [n] nodes, each the parent of the one before it.
            new: Whether to make new copies. Without, only existing copies are kept.

        Returns:
            Pages to swap out, each with its slot.
        """
        hashes, out = index.hashes(run), list[tuple[int, int]]()
        parents = [*hashes[1:], *(index.hashes([index.parent[run[-1]]]) if index.parent[run[-1]] != NONE else [FIRST])]
        for node, block_hash, parent in zip(run, hashes, parents, strict=True):
            copy, content = self.copies.pop(block_hash, None), index.content(node)
            if copy is not None and (copy.parent, copy.content) == (parent, content):
                self.copies[block_hash] = copy  # at the end of the order of use
                continue
            if copy is not None:  # a collision: the copy has another content, and all copies after it do too
                self.copies[block_hash] = copy
                self.forget([block_hash])
            pages = index.pages[:, node].tolist()
            wanted = len(pages) - pages.count(NONE)
            # A node without pages gets a copy without slots where copies come after it, which are found through it.
            slots = self._take(index, wanted) if new and (wanted or block_hash in self._after) else None
            if slots is None:
                # No copy of this page: those after it cannot be found any more.
                self._drop_after(block_hash, index)
                continue
            copy = Copy(parent, content, tuple(NONE if page == NONE else slots.pop() for page in pages))
            self.copies[block_hash] = copy
            self._after.setdefault(parent, {})[block_hash] = None
            out += [(page, slot) for page, slot in zip(pages, copy.slots, strict=True) if page != NONE]
        return out

    def _take(self, index: PrefixIndex, count: int) -> list[int] | None:
        """Takes slots, dropping the least recently used copies where too few are free.

        Returns:
            `count` slots, or None where the next plan reads all that could be dropped.
        """
        while len(self._free) < count:
            oldest = next((block_hash for block_hash in self.copies if block_hash not in self._read), None)
            if oldest is None:
                return None
            self._drop(oldest)
            if oldest not in index:  # else copies after it are still found through the pool
                self._drop_after(oldest, index)
        return [self._free.pop() for _ in range(count)]

    def reserve(self, hashes: Sequence[BlockHash]) -> None:
        """Reserves the slots of copies until the next plan, which reads them.

        Args:
            hashes: Block hashes of copies, in order of the tokens.
        """
        # In reverse, so that later pages count as less recently used: an earlier copy dropped first would take all
        # later ones with it.
        for block_hash in reversed(hashes):
            self._read[block_hash] = self.copies[block_hash] = self.copies.pop(block_hash)

    def fetch(self, hashes: Sequence[BlockHash], pages: Pages, step: int) -> list[tuple[int, int]]:
        """Plans swap-ins of reserved copies.

        Args:
            hashes: [n] block hashes of the copies.
            pages: [groups, n] pages to fill, NONE where a page is not needed.
            step: Number of the step whose plan reads them.

        Returns:
            Slots to read, each with its page.
        """
        self._arriving.setdefault(step, []).append((hashes, pages))
        slots = np.array([self._read[block_hash].slots for block_hash in hashes], np.int32).T
        return list(zip(slots[pages != NONE].tolist(), pages[pages != NONE].tolist(), strict=True))

    def arrived(self, step: int, lost: Sequence[int]) -> None:
        """Takes in the result of a step's swap-ins: drops the copies whose slots did not hold the stored content.

        Args:
            step: The step that has run.
            lost: Pages that were to be filled from such slots.
        """
        for hashes, pages in self._arriving.pop(step, ()):
            wrong = np.isin(pages, list(lost))
            if wrong.any():
                self.lost += int(np.count_nonzero(wrong))
                self.forget([hashes[i] for i in np.flatnonzero(wrong.any(axis=0)).tolist()])

    def planned(self, changes: PageChanges) -> None:
        """Ends the reservations, now that the swaps are in a plan, and counts the swaps.

        Plans run in order, so a later plan may write slots that this one reads.

        Args:
            changes: Page changes of the plan.
        """
        self.swapped_out += len(changes.swap_outs())
        self.swapped_in += len(changes.swap_ins())
        self._read.clear()
        self._free += self._resting
        self._resting.clear()

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Drops the copies of these block hashes, and all copies after them."""
        doomed = list(hashes)
        while doomed:
            block_hash = doomed.pop()
            doomed += self._after.get(block_hash, ())
            self._drop(block_hash)

    def clear(self) -> None:
        """Drops all copies."""
        self.forget(list(self.copies))

    def _drop(self, block_hash: BlockHash) -> None:
        """Drops one copy if there is one, and copies without slots before it that nothing needs any more."""
        copy = self.copies.pop(block_hash, None)
        if copy is None:
            return
        slots = [slot for slot in copy.slots if slot != NONE]
        (self._resting if block_hash in self._read else self._free).extend(slots)
        after = self._after[copy.parent]
        del after[block_hash]
        if not after:
            del self._after[copy.parent]
            before = self.copies.get(copy.parent)
            if before is not None and before.slots.count(NONE) == len(before.slots):
                self._drop(copy.parent)

    def _drop_after(self, block_hash: BlockHash, index: PrefixIndex) -> None:
        """Drops the copies that were found only through a page, which is neither published nor copied any more."""
        doomed = list(self._after.get(block_hash, ()))
        while doomed:
            after = doomed.pop()
            if after not in index:
                doomed += self._after.get(after, ())
            self._drop(after)
