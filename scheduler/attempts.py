"""Open attempts: which of their sequences have not ended, and ends that are not reported yet."""

from collections.abc import Iterable
from typing import Any

from scheduler.events import End, EndReason


class Attempts:
    """Open attempts of one engine.

    Attributes:
        ends: Ends that `take_ends` will return. Fields of `End` beside the reason are passed by name.
    """

    def __init__(self) -> None:
        self._open: dict[int, set[int]] = {}
        self.ends: list[End] = []

    def live(self) -> list[int]:
        return list(self._open)

    def __contains__(self, attempt: int) -> bool:
        """Whether some sequence of the attempt has not ended."""
        return attempt in self._open

    def has(self, attempt: int, index: int) -> bool:
        return index in self._open.get(attempt, ())

    def indices(self, attempt: int) -> list[int]:
        """Returns the attempt's sequences that have not ended."""
        return sorted(self._open.get(attempt, ()))

    def open(self, attempt: int, indices: Iterable[int]) -> None:
        """Opens an attempt of which these sequences are to be run."""
        self._open[attempt] = set(indices)

    def end(self, attempt: int, index: int, reason: EndReason, **said: Any) -> None:
        """Ends one sequence, and with the last of them the attempt."""
        left = self._open[attempt]
        left.remove(index)
        if not left:
            del self._open[attempt]
        self.ends.append(End(attempt, reason, index=index, more=bool(left), **said))

    def end_all(self, attempt: int, reason: EndReason, **said: Any) -> Iterable[int]:
        """Ends an attempt. Returns the sequences that had not ended, none for an unknown attempt."""
        left = self._open.pop(attempt, None)
        if left is None:
            return ()
        self.ends.append(End(attempt, reason, index=min(left, default=0), **said))
        return sorted(left)

    def take_ends(self) -> tuple[End, ...]:
        if not self.ends:  # as in most steps
            return ()
        ends, self.ends = tuple(self.ends), []
        return ends
