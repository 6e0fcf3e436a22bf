"""Ghosts: block hashes of evicted pages, remembered for a while together with what the policy knew of the pages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache_manager.page_names import Name


@dataclass(frozen=True, slots=True)
class Ghost:
    """Pages `start` and on of a run that was evicted together.

    Attributes:
        names: Block hashes in order of the tokens.
        start: Index of the first one that is still remembered.
        kind: Class, as in `cache_manager.runs.Run`.
        last: Time when the last request left, as there.
        generation: Number of the generation that it belongs to.
    """

    names: list[Name]
    start: int
    kind: int
    last: int
    generation: int

    def __len__(self) -> int:
        return len(self.names) - self.start


@dataclass(frozen=True, slots=True)
class Recalled:
    """Places start .. end - 1 of the block hashes that were asked for belong to a ghost."""

    start: int
    end: int
    kind: int
    last: int


class Ghosts:
    """Two generations of ghosts, so that the oldest are forgotten all at once.

    Args:
        pages: A generation is full with so many.
    """

    def __init__(self, pages: int) -> None:
        self._most = pages
        # By the first block hash: hashes are chained, so a page comes back after the ghosts of those before it.
        self._ghosts: dict[Name, Ghost] = {}
        self._generation = 0
        self._young_pages = 0

    def remember(self, names: list[Name], kind: int, last: int) -> Counter[tuple[int, int]]:
        """Adds pages that were evicted together.

        Args:
            names: [n] block hashes in order of the tokens.
            kind: Class of the pages.
            last: Time when their last request left.

        Returns:
            Pages that are forgotten for them, by `last` and `kind`.
        """
        self._add(Ghost(names, 0, kind, last, self._generation))
        forgotten = Counter[tuple[int, int]]()
        if self._young_pages >= self._most:
            for name, ghost in list(self._ghosts.items()):
                if ghost.generation < self._generation:
                    forgotten[ghost.last, ghost.kind] += len(ghost)
                    del self._ghosts[name]
            self._generation += 1
            self._young_pages = 0
        return forgotten

    def recall(self, names: Sequence[Name]) -> list[Recalled]:
        """Takes pages that are published again out of the ghosts.

        Args:
            names: [n] their block hashes; in order of the tokens where they are of one sequence.

        Returns:
            Stretches of them that were ghosts, none of which overlap.
        """
        found = list[Recalled]()
        if self._ghosts.keys().isdisjoint(names):
            return found
        at = 0
        while at < len(names):
            ghost = self._ghosts.get(names[at])
            if ghost is None:
                at += 1
                continue
            self._remove(ghost)
            count = _in_common(ghost, names, at)
            if count < len(ghost):
                self._add(replace(ghost, start=ghost.start + count))
            found.append(Recalled(at, at + count, ghost.kind, ghost.last))
            at += count
        return found

    def _add(self, ghost: Ghost) -> None:
        before = self._ghosts.get(ghost.names[ghost.start])
        if before is not None:
            self._remove(before)
        self._ghosts[ghost.names[ghost.start]] = ghost
        self._young_pages += len(ghost) * (ghost.generation == self._generation)

    def _remove(self, ghost: Ghost) -> None:
        del self._ghosts[ghost.names[ghost.start]]
        self._young_pages -= len(ghost) * (ghost.generation == self._generation)


def _in_common(ghost: Ghost, names: Sequence[Name], at: int) -> int:
    """Pages of a ghost, from its first one on, that are those of `names` from `at` on; 1 at least."""
    most = min(len(ghost), len(names) - at)
    if ghost.names[ghost.start : ghost.start + most] == list(names[at : at + most]):
        return most
    return next(i for i in range(most) if ghost.names[ghost.start + i] != names[at + i])
