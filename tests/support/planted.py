"""Plants faults in the product, and chooses those that a quick run plants."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
    """Replaces a function of the product by a wrong one, for one test.

    Args:
        monkeypatch: Takes the fault back at the end of the test.
        target: Class, module or object that has the function.
        name: Name of the function; it may be private.
        stand_in: Returns the wrong function for the right one.
    """
    monkeypatch.setattr(target, name, stand_in(getattr(target, name)))


def planted(names: Iterable[str], rare: Collection[str]) -> list[Any]:
    """Parameters of a test: all faults, of which the rare ones are slow.

    Args:
        names: Of all faults.
        rare: Those that show in few histories, so that it takes a second or more to find one.
    """
    faults = list(names)
    unknown = {*rare} - {*faults}
    if unknown:
        raise ValueError(f"there are no faults {sorted(unknown)}")
    return [pytest.param(name, marks=[pytest.mark.slow] if name in rare else []) for name in faults]
