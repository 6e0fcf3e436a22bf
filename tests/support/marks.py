"""Parameters of laws that `make test` runs for some of their cases, and `make test-slow` for the others."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import pytest

MANY = 12  # cases of a test, from which on a run of one part leaves some out


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
    sampled = (i for i in items if i.get_closest_marker("sample") is not None and i.get_closest_marker("slow") is None)
    for cases in _by_test(sampled):
        sample = cases[0].get_closest_marker("sample")
        count = 1 if sample is None else sample.args[0]
        places = _places(cases)
        left = [place % count == 0 for place in places] if any(place % count == 0 for place in places) else [True]
        for item, stays in zip_longest(cases, left, fillvalue=False):
            if not stays:
                item.add_marker(pytest.mark.slow)


def beyond_part(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases that a run of one part leaves out; none where `TEST_PART` is not set.

    `TEST_PART=1/3` runs about every third case of each test with many, and all of the other tests. Parts 0/3, 1/3 and
    2/3 together run all.

    Raises:
        ValueError: The part is none.
    """
    if not (asked := os.environ.get("TEST_PART")):
        return []
    part, _, parts = asked.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"TEST_PART is {asked!r}, must be like 1/3: a part from 0 on, and the number of parts")
    return [
        case
        for cases in _by_test(item for item in items if hasattr(item, "callspec"))
        if len(cases) >= MANY
        for case, place in zip(cases, _places(cases), strict=True)
        if place % int(parts) != int(part)
    ]


def _by_test(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """Returns the cases of each test."""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.path.as_posix(), item.name.partition("[")[0]), []).append(item)
    return tests.values()


def _places(cases: Sequence[Any]) -> list[int]:
    """Returns the sum of each case's indices. Arguments that are parametrized together count once."""
    indices = [case.callspec.indices for case in cases]
    columns = {tuple(each[name] for each in indices) for name in indices[0]}
    return [sum(column) for column in zip(*columns, strict=True)]
