"""Parameters of laws that `make test` runs for some of their cases, and `make test-slow` for the others."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
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
    """Marks the cases of a test with `sample(n)` as slow, but for about each n-th of those that are not slow already.

    Cases of several parameters are left along diagonals, so that each value of each parameter is among them.
    """
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("slow") is None:
            tests.setdefault((item.path.as_posix(), item.name.partition("[")[0]), []).append(item)
    for cases in tests.values():
        sample = cases[0].get_closest_marker("sample")
        count = 1 if sample is None else sample.args[0]
        places = _places(cases)
        left = [place % count == 0 for place in places] if any(place % count == 0 for place in places) else [True]
        for item, stays in zip_longest(cases, left, fillvalue=False):
            if not stays:
                item.add_marker(pytest.mark.slow)


def _places(cases: Sequence[Any]) -> list[int]:
    """Returns the sum of each case's indices. Arguments that are parametrized together count once."""
    indices = [case.callspec.indices for case in cases]
    columns = {tuple(each[name] for each in indices) for name in indices[0]}
    return [sum(column) for column in zip(*columns, strict=True)]
