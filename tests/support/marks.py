"""Parameters of laws that `make test` runs for some of their cases, and `make test-slow` for the others."""

from collections.abc import Callable, Collection, Iterable
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
