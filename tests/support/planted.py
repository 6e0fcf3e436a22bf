"""Which planted faults a quick run plants."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
