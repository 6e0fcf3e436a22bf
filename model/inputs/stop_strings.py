"""Finds stop strings in text that comes in parts, and holds back text that may begin one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Result of a part of text.

    Attributes:
        text: Text that may be given out.
        stop: The stop string that matched, after which no text follows. None for no match.
        before: Without a match `text`, with one what of it stands before the stop string.
    """

    text: str
    stop: str | None = None
    before: str = ""


class StopStrings:
    """Searches a text for stop strings, part by part.

    The match that completes first wins; of several that complete together, the first of the list. The cutting of the
    text into parts makes no difference. A match can be passed over, and the search goes on behind it.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        """Makes a search.

        Args:
            stops: Stop strings, none of them empty.
            include: Keep the stop string in the text.
        """
        self._stops, self._include = stops, include
        self._beginnings = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._matched = "", 0, 0  # the text of the last match, where it ends there, and its number in the list

    def push(self, text: str, searched: bool = True) -> StopMatch:
        """Takes the next part.

        Args:
            text: The part.
            searched: Whether a stop string that completes in it counts.
        """
        if not self._held and self._beginnings.isdisjoint(text):
            return StopMatch(text, before=text)  # no stop string begins in it, as in most tokens' text: 2 us quicker
        whole = self._held + text
        if not searched:
            return self._hold_back(whole)
        # What is held was searched before, so a match completes in the new part.
        return self._search(whole, len(self._held), len(self._stops))

    def pass_over(self) -> StopMatch:
        """Takes the last match for text like any other, and returns the next one of the same part."""
        return self._search(*self._matched)

    def _search(self, whole: str, end: int, number: int) -> StopMatch:
        """Searches a text for the first match after one that ends at `end` and has this number in the list."""
        best: tuple[int, int] | None = None
        for i, stop in enumerate(self._stops):
            start = whole.find(stop, max(0, end - len(stop) + (i <= number)))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), i
        if best is None:
            return self._hold_back(whole)
        self._held, self._matched = "", (whole, *best)
        stop = self._stops[best[1]]
        start = best[0] - len(stop)
        return StopMatch(whole[: best[0] if self._include else start], stop, whole[:start])

    def _hold_back(self, whole: str) -> StopMatch:
        keep = self._possible_start(whole)
        self._held = whole[len(whole) - keep :]
        text = whole[: len(whole) - keep]
        return StopMatch(text, before=text)

    def flush(self) -> str:
        """Returns the text that was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Returns the length of the longest end of the text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0
