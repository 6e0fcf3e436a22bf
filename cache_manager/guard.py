"""Holds a policy to least recently used: counts what that policy would hit, and limits how much may be lost to it.

The pages that a cache of the same size would hold under least recently used are those used last. So their number by
time of last use suffices to count its hits: no page is looked up, and no second cache is kept.
"""

from collections.abc import Mapping

START = 0.5  # budget at the start, in capacities of the pool
CREDIT = 2.5  # the highest budget, in capacities: what was won longer ago may not be lost again
EXPLORE = 1 / 8192  # added to the budget for each page that is requested again while it is held or remembered


class RecencyShadow:
    """Numbers of pages that the cache would hold if it evicted the least recently used, by the time of last use."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}  # in order of time
        self._total = 0

    def __len__(self) -> int:
        """Returns the number of pages that it holds."""
        return self._total

    def take_out(self, last: int, pages: int) -> int:
        """Takes out pages of one time of last use, the first ones of their request.

        Args:
            last: Time of last use.
            pages: Their number, 1 or more.

        Returns:
            The number of them that were held.
        """
        held = self._pages.get(last, 0)
        if held <= pages:
            self._pages.pop(last, None)
            pages = held
        else:
            self._pages[last] = held - pages
        self._total -= pages
        return pages

    def put(self, now: int, pages: int) -> None:
        """Adds pages that were used now.

        Args:
            now: Time, later than in any call before.
            pages: Their number, 1 or more.
        """
        self._pages[now] = pages
        self._total += pages

    def shrink(self, most: int) -> None:
        """Evicts the least recently used pages, down to a number of pages."""
        while self._total > most:
            last = next(iter(self._pages))
            self.take_out(last, self._total - most)


def margin(budget: float) -> float:
    """Returns the margin for a budget, which is in parts of the one at the start.

    It is 0 where the budget is spent, 0.5 from 0.5 to 0.9, and 1 from 1 on.
    """
    return max(0.0, min(budget, 0.5), min(1.0, 5 * budget - 4))


class RecencyGuard:
    """Tells how far a policy may deviate from least recently used.

    Keeps a budget of hits: it rises with the policy's hits and falls with those of least recently used. While it is
    spent, the policy must evict the least recently used page. Then it has at least the hits of least recently used,
    less `START` of the capacity, less `EXPLORE` for each page that is requested again, less one capacity. The last term
    is what least recently used holds and the policy does not when the budget is spent: each of these pages is missed
    once. Count and bound are exact for requests one after the other. Where requests overlap, the count follows the
    number of pages that the policy itself holds.

    As the budget falls, the policy needs ever clearer reasons to deviate. At half the worth it still wins most of what
    it can win, and loses little where it is wrong, so the margin soon falls to 0.5 and stays there for a while.

    Args:
        pages: Pages of the pool.

    Attributes:
        budget: Hits that the policy may still lose to least recently used; spent at 0 and below.
        margin: 0 .. 1. The policy may evict a page other than the least recently used if it is worth less than this
            part of that page's worth.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self.budget = START * pages
        self._shadow = RecencyShadow()
        self._held = 0  # pages that the policy itself holds and that some request has left
        self.margin = 1.0

    def used(self, now: int, pages: int, held: int, returned: Mapping[int, int]) -> None:
        """Observes a request that has left.

        Args:
            now: Time, later than in any call before.
            pages: Pages of the request.
            held: Pages of it that the policy held when it came.
            returned: Pages of it that the policy held or that are remembered, by the time of their last use.
        """
        theirs = sum(self._shadow.take_out(last, count) for last, count in returned.items())
        self._shadow.put(now, pages)
        self._held += pages - held
        self._shadow.shrink(self._held)
        earned = held - theirs + EXPLORE * sum(returned.values())
        self.budget = min(CREDIT * self._pages, self.budget + earned)
        self.margin = margin(self.budget / (START * self._pages))

    def evicted(self, pages: int) -> None:
        """Observes that the policy has evicted pages that it chose."""
        self._held -= pages
        self._shadow.shrink(self._held)

    def removed(self, last: int, pages: int) -> None:
        """Observes that pages were removed which the policy did not choose: no policy would hold them."""
        self._shadow.take_out(last, pages)
        self.evicted(pages)
