"""Windows, by positions: the tokens that one sees, and the pages that a sequence holds while it is computed.

All of it by looking at every position; the arithmetic that serves is not used.
"""

from dataclasses import dataclass
from functools import lru_cache
from random import Random

from cache_manager.layout import MOST_TOKENS

NO_INDICES: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Windows:
    """by_group: tokens that one sees, itself included, None for all before it. ahead: tokens of a sequence that are in
    flight at most.
    """

    by_group: tuple[int | None, ...] = (None,)
    ahead: int = MOST_TOKENS

    @property
    def groups(self) -> int:
        return len(self.by_group)

    @property
    def any(self) -> bool:
        return any(window is not None for window in self.by_group)


NO_WINDOWS = Windows()


def full(groups: int) -> Windows:
    """All groups see all."""
    return Windows((None,) * groups)


def first_seen(window: int | None, position: int) -> int:
    """The first position that this one sees."""
    return 0 if window is None else max(0, position - window + 1)


def first_needed(window: int | None, position: int, page_size: int) -> int:
    """The first page that a sequence holds which goes on from here, where all before is published: what it sees,
    and one full page to go on from.
    """
    return min(first_seen(window, position) // page_size, max(0, position // page_size - 1))


@lru_cache(maxsize=1 << 16)
def most_held(
    window: int | None,
    page_size: int,
    ahead: int,
    first: int,
    held: int,
    start: int,
    end: int,
    others: frozenset[int] = NO_INDICES,
) -> int:
    """Most pages that a sequence holds at one time until positions start .. end - 1 are computed, beside those of
    these indices, which `others` hold. It holds first .. held - 1 now, and gets slots for `ahead` tokens at a time.
    """
    most = 0
    for computed in range(start, end + 1):
        after = max(held, -(-min(end, computed + ahead) // page_size))
        before = max(first, first_needed(window, computed, page_size) if computed > start else 0)
        most = max(most, sum(index not in others for index in range(before, after)))
    return most


def draw(rng: Random, page_size: int, kinds: tuple[str, ...]) -> Windows:
    """Draws windows of one of these kinds: none, full attention beside windows, windows only."""
    kind = rng.choice(kinds)
    if kind == "full":
        return full(rng.choice((1, 2)))
    equal, number = rng.random() < 0.3, rng.choice((1, 2))
    by_group: list[int | None] = [rng.randrange(1, 3 * page_size + 2) for _ in range(number)]
    if equal:
        by_group = by_group[:1] * number
    if kind == "hybrid":
        by_group.insert(rng.randrange(number + 1), None)
    ahead = rng.randrange(1, 4 * page_size + 1) if rng.random() < 0.8 else MOST_TOKENS
    return Windows(tuple(by_group), ahead)
