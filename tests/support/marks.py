"""Parameters of laws that `make test` runs for some of their cases, and `make test-slow` for the others."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest


def few(name: str, cases: Iterable[Any], quick: Collection[Any]) -> Callable[[Any], Any]:
    """Parametrizes a test with cases, of which all but a few are slow.

    Args:
        name: Name of the parameter.
        cases: All cases.
        quick: Those that are not slow, or their names.

    Raises:
        ValueError: A quick case is none of them.
    """
    cases = list(cases)
    if unknown := [str(one) for one in quick if str(one) not in {str(case) for case in cases}]:
        raise ValueError(f"no such case: {', '.join(unknown)}")
    chosen = {str(one) for one in quick}
    marked = [pytest.param(case, marks=[] if str(case) in chosen else [pytest.mark.slow]) for case in cases]
    return pytest.mark.parametrize(name, marked, ids=str)


def mark_beyond_samples(items: Sequence[pytest.Item]) -> None:
    """Marks the cases of a test with `sample(n)` as slow, but for each n-th of those that are not slow already."""
    seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is None or item.get_closest_marker("slow") is not None:
            continue
        place = (item.path.as_posix(), item.name.partition("[")[0])
        if seen[place] % sample.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[place] += 1
