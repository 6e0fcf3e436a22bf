"""Which sequences of each attempt are still at work, and the ends that are to be told."""

from collections.abc import Iterable
from typing import Any

from scheduler.events import End, EndReason


class Attempts:
    """ends: not told yet. What an end says beside its reason is given by name: see `End`."""

    def __init__(self) -> None:
        self._open: dict[int, set[int]] = {}
        self.ends: list[End] = []

    def live(self) -> list[int]:
        return list(self._open)

    def __contains__(self, attempt: int) -> bool:
        """Whether some of its sequences have not ended."""
        return attempt in self._open

    def has(self, attempt: int, index: int) -> bool:
        return index in self._open.get(attempt, ())

    def indices(self, attempt: int) -> list[int]:
        """Its sequences that have not ended."""
        return sorted(self._open.get(attempt, ()))

    def open(self, attempt: int, indices: Iterable[int]) -> None:
        """These of its sequences are to be run."""
        self._open[attempt] = set(indices)

    def end(self, attempt: int, index: int, reason: EndReason, **said: Any) -> None:
        """One of its sequences has ended, and with the last of them the attempt."""
        left = self._open[attempt]
        left.remove(index)
        if not left:
            del self._open[attempt]
        self.ends.append(End(attempt, reason, index=index, more=bool(left), **said))

    def end_all(self, attempt: int, reason: EndReason, **said: Any) -> Iterable[int]:
        """Returns the sequences that had not ended: none for an attempt that is not known."""
        left = self._open.pop(attempt, None)
        if left is None:
            return ()
        self.ends.append(End(attempt, reason, index=min(left, default=0), **said))
        return sorted(left)

    def take_ends(self) -> tuple[End, ...]:
        ends, self.ends = tuple(self.ends), []
        return ends
