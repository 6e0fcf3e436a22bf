"""Ghosts: block hashes of evicted pages, remembered for a while with the pages' class and last use."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache_manager.block_hash import BlockHash


@dataclass(slots=True)  # not frozen, see `scheduler.events.EngineStats`
class Ghost:
    """Pages of a run that were evicted together, from `start` on.

    Attributes:
        hashes: Block hashes in order of the tokens.
        start: Index of the first one that is still remembered.
        kind: Class, as in `cache_manager.runs.Run`.
        last: Time when the last request left, as there.
        generation: Generation that the ghost belongs to.
    """

    hashes: list[BlockHash]
    start: int
    kind: int
    last: int
    generation: int

    def __len__(self) -> int:
        return len(self.hashes) - self.start


@dataclass(frozen=True, slots=True)
class Recalled:
    """A stretch of recalled block hashes that were one ghost.

    Attributes:
        start: First place in the list of hashes that was asked for.
        end: Place after the last one.
        kind: Class of the pages.
        last: Time when their last request left.
    """

    start: int
    end: int
    kind: int
    last: int


class Ghosts:
    """Two generations of ghosts: when the young one is full, the old one is forgotten at once.

    Args:
        pages: Pages at which a generation is full.
    """

    def __init__(self, pages: int) -> None:
        self._most = pages
        # By the first block hash. Hashes are chained, so a page can come back only after the pages before it.
        self._ghosts: dict[BlockHash, Ghost] = {}
        self._generation = 0
        self._young_pages = 0

    def remember(self, hashes: list[BlockHash], kind: int, last: int) -> dict[tuple[int, int], int]:
        """Adds pages that were evicted together.

        Args:
            hashes: [n] block hashes in order of the tokens.
            kind: Class of the pages.
            last: Time when their last request left.

        Returns:
            Number of pages that are forgotten now, by `last` and `kind`.
        """
        self._add(Ghost(hashes, 0, kind, last, self._generation))
        forgotten = dict[tuple[int, int], int]()
        if self._young_pages >= self._most:
            for block_hash, ghost in list(self._ghosts.items()):
                if ghost.generation < self._generation:
                    place = ghost.last, ghost.kind
                    forgotten[place] = forgotten.get(place, 0) + len(ghost)
                    del self._ghosts[block_hash]
            self._generation += 1
            self._young_pages = 0
        return forgotten

    def recall(self, hashes: Sequence[BlockHash]) -> list[Recalled]:
        """Removes pages that are published again from the ghosts.

        Args:
            hashes: [n] their block hashes; in order of the tokens where they are of one sequence.

        Returns:
            Stretches of the hashes that were ghosts; none overlap.
        """
        found = list[Recalled]()
        # Mostly none is a ghost, which one set operation tells.
        if self._ghosts.keys().isdisjoint(hashes):
            return found
        at = 0
        while at < len(hashes):
            ghost = self._ghosts.get(hashes[at])
            if ghost is None:
                at += 1
                continue
            self._remove(ghost)
            count = _in_common(ghost, hashes, at)
            if count < len(ghost):
                self._add(replace(ghost, start=ghost.start + count))
            found.append(Recalled(at, at + count, ghost.kind, ghost.last))
            at += count
        return found

    def _add(self, ghost: Ghost) -> None:
        before = self._ghosts.get(ghost.hashes[ghost.start])
        if before is not None:
            self._remove(before)
        self._ghosts[ghost.hashes[ghost.start]] = ghost
        self._young_pages += len(ghost) * (ghost.generation == self._generation)

    def _remove(self, ghost: Ghost) -> None:
        del self._ghosts[ghost.hashes[ghost.start]]
        self._young_pages -= len(ghost) * (ghost.generation == self._generation)


def _in_common(ghost: Ghost, hashes: Sequence[BlockHash], at: int) -> int:
    """Returns how many leading pages of a ghost equal the hashes from `at` on; at least 1."""
    most = min(len(ghost), len(hashes) - at)
    if ghost.hashes[ghost.start : ghost.start + most] == list(hashes[at : at + most]):
        return most
    return next(i for i in range(most) if ghost.hashes[ghost.start + i] != hashes[at + i])
