"""Parameters of laws that `make test` runs for some of their cases, and `make test-slow` for the others."""

import os
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
    """Returns the tests and cases that a run of one part leaves out; none where `TEST_PART` is not set.

    `TEST_PART=1/3` runs about every third case of each test, of those that have a single case about every third, and
    all that have the mark `every_part`. Parts 0/3, 1/3 and 2/3 together run all.

    Raises:
        ValueError: The part is none.
    """
    if not (asked := os.environ.get("TEST_PART")):
        return []
    part, _, parts = asked.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"TEST_PART is {asked!r}, must be like 1/3: a part from 0 on, and the number of parts")
    divided = [item for item in items if item.get_closest_marker("every_part") is None]
    slow = [item for item in divided if item.get_closest_marker("slow") is not None]
    quick = [item for item in divided if item.get_closest_marker("slow") is None]
    return [
        case
        for run in (slow, quick)
        for number, cases in enumerate(_by_test(run))
        for case, turn in zip(cases, _turns(cases), strict=True)
        if (number + turn) % int(parts) != int(part)
    ]


def _turns(cases: Sequence[pytest.Item]) -> list[int]:
    """Returns numbers of a test's cases, consecutive from 0 on. Cases of one diagonal have the same."""
    places = _places(cases)
    turns = {place: turn for turn, place in enumerate(sorted({*places}))}
    return [turns[place] for place in places]


def _by_test(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """Returns the cases of each test."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests.values()


def _places(cases: Sequence[Any]) -> list[int]:
    """Returns the sum of each case's indices. Arguments that are parametrized together count once."""
    if not hasattr(cases[0], "callspec"):
        return [0]
    indices = [case.callspec.indices for case in cases]
    columns = {tuple(each[name] for each in indices) for name in indices[0]}
    return [sum(column) for column in zip(*columns, strict=True)]
