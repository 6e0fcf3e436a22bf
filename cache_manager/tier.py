"""The host tier's books: which published pages have a copy in host memory, and in which of its slots.

Pages that are evicted for their place are copied out; a prompt that starts alike has them copied back, into pages of
its own. Copies are found by name, and confirmed by the content of their page and the name before it. (The prefix index
confirms all pages before it too.) They stay after they were used, so that what goes out again costs nothing. Least
recently used ones go first. A copy is of use only to who has all before it: one whose predecessor is neither in the
pool nor here is dropped.

Slots are numbers: what is in them, and whether it is still right, is the page store's business (`model.page_store`). A
tier below this one, on disk say, would be asked by the same names.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.changes import PageChanges
from cache_manager.page_names import NAME_BYTES, Name, PageChain
from cache_manager.prefix import NONE, PrefixIndex

FIRST = bytes(NAME_BYTES)
"""What stands for the name before a first page's."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Of the pages of one name, in these slots, by group, NONE where the page had left its group's window. parent: the
    name before it.
    """

    parent: Name
    content: bytes
    slots: tuple[int, ...]


class HostTier:
    """Copies in `slots` places, each for one page; a name takes one for each of `groups` at most.

    copies: by name, the least recently used first. swapped_out, swapped_in: pages that were planned to be copied.
    lost: pages whose copy was not what had been put there.
    """

    def __init__(self, slots: int, groups: int = 1) -> None:
        if slots < groups:
            raise ValueError(f"a host tier needs at least {groups} slots, got {slots}")
        self.slots = slots
        self.copies: dict[Name, Copy] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._after: dict[Name, set[Name]] = {}  # copies by the name before them
        self._read: dict[Name, Copy] = {}  # copies that the next plan reads
        self._resting: list[int] = []  # slots of such copies that were dropped
        self._arriving: dict[int, list[tuple[Sequence[Name], Pages]]] = {}  # by step: to pages [groups, names]
        self.swapped_out = self.swapped_in = self.lost = 0

    @property
    def used(self) -> int:
        return self.slots - len(self._free) - len(self._resting)

    def free_slots(self) -> list[int]:
        """Slots of no copy; some of them may still be read by the next plan."""
        return self._free + self._resting

    def slots_of(self, names: Sequence[Name]) -> NDArray[np.int32]:
        """[groups, names] of copies, NONE where a page had left its group's window."""
        return np.array([self.copies[name].slots for name in names], np.int32).T

    def find(self, chain: PageChain, start: int, most: int) -> list[Name]:
        """Names of the chain's pages from index `start` on, at most up to `most`, that have copies."""
        found = list[Name]()
        parent = chain.names[start - 1] if start else FIRST
        for name, content in zip(chain.names[start:most], chain.contents[start:most], strict=True):
            copy = self.copies.get(name)
            if copy is None or copy.content != content or copy.parent != parent:
                break
            found.append(name)
            parent = name
        return found

    def keep(self, index: PrefixIndex, run: Sequence[int], new: bool = True) -> list[tuple[int, int]]:
        """The pages of these nodes, each the parent of the one before it, have just lost their names. Makes room for
        copies of them; only where there are some already unless `new`. Returns what must be copied: page, slot.
        """
        names, out = index.names(run), list[tuple[int, int]]()
        parents = [*names[1:], *(index.names([index.parent[run[-1]]]) if index.parent[run[-1]] != NONE else [FIRST])]
        for node, name, parent in zip(run, names, parents, strict=True):
            copy, content = self.copies.pop(name, None), index.content(node)
            if copy is not None and (copy.parent, copy.content) == (parent, content):
                self.copies[name] = copy  # from now on the latest
                continue
            if copy is not None:  # of something else that has this name
                self.copies[name] = copy
                self.forget([name])
            pages = index.pages[:, node].tolist()
            wanted = len(pages) - pages.count(NONE)
            # What has no pages any more is kept as the way to what comes after it.
            slots = self._take(index, wanted) if new and (wanted or name in self._after) else None
            if slots is None:
                self._drop_after(name, index)
                continue
            copy = Copy(parent, content, tuple(NONE if page == NONE else slots.pop() for page in pages))
            self.copies[name] = copy
            self._after.setdefault(parent, set()).add(name)
            out += [(page, slot) for page, slot in zip(pages, copy.slots, strict=True) if page != NONE]
        return out

    def _take(self, index: PrefixIndex, count: int) -> list[int] | None:
        """So many slots; None where the next plan reads too many of them."""
        while len(self._free) < count:
            oldest = next((name for name in self.copies if name not in self._read), None)
            if oldest is None:
                return None
            self._drop(oldest)
            if oldest not in index:
                self._drop_after(oldest, index)
        return [self._free.pop() for _ in range(count)]

    def reserve(self, names: Sequence[Name]) -> None:
        """These copies will be read by the next plan: until then nothing else takes their slots.

        Later ones count as used before earlier ones, so that these do not go first.
        """
        for name in reversed(names):
            self._read[name] = self.copies[name] = self.copies.pop(name)

    def fetch(self, names: Sequence[Name], pages: Pages, step: int) -> list[tuple[int, int]]:
        """These copies, which are reserved, are read by the next plan, that of `step`, into pages [groups, names], NONE
        for those that are not needed. Returns what must be copied: slot, page.
        """
        self._arriving.setdefault(step, []).append((names, pages))
        slots = np.array([self._read[name].slots for name in names], np.int32).T
        return list(zip(slots[pages != NONE].tolist(), pages[pages != NONE].tolist(), strict=True))

    def arrived(self, step: int, lost: Sequence[int]) -> None:
        """Drops the copies that were to be brought by this step into pages that are `lost`."""
        for names, pages in self._arriving.pop(step, ()):
            wrong = np.isin(pages, list(lost))
            if wrong.any():
                self.lost += int(np.count_nonzero(wrong))
                self.forget([names[i] for i in np.flatnonzero(wrong.any(axis=0)).tolist()])

    def planned(self, changes: PageChanges) -> None:
        """All that was to be copied stands in a plan; what is dropped from now on is not read any more."""
        self.swapped_out += len(changes.swap_outs())
        self.swapped_in += len(changes.swap_ins())
        self._read.clear()
        self._free += self._resting
        self._resting.clear()

    def forget(self, names: Iterable[Name]) -> None:
        """Drops the copies of these names, and all that come after them."""
        doomed = list(names)
        while doomed:
            name = doomed.pop()
            doomed += self._after.get(name, ())
            self._drop(name)

    def clear(self) -> None:
        self.forget(list(self.copies))

    def _drop(self, name: Name) -> None:
        copy = self.copies.pop(name, None)
        if copy is None:
            return
        slots = [slot for slot in copy.slots if slot != NONE]
        (self._resting if name in self._read else self._free).extend(slots)
        after = self._after[copy.parent]
        after.remove(name)
        if not after:
            del self._after[copy.parent]
            before = self.copies.get(copy.parent)
            if before is not None and before.slots.count(NONE) == len(before.slots):
                self._drop(copy.parent)

    def _drop_after(self, name: Name, index: PrefixIndex) -> None:
        """Drops what can only be reached through this name, which is neither in the pool nor here any more."""
        doomed = list(self._after.get(name, ()))
        while doomed:
            after = doomed.pop()
            if after not in index:
                doomed += self._after.get(after, ())
            self._drop(after)
