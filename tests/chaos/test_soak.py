"""A short soak; the long one is a command, `python -m tests.chaos.soak`."""

import pytest

from tests.chaos.soak import soak


@pytest.mark.slow
def test_a_short_soak_loses_and_doubles_nothing() -> None:
    done = soak(6, seed=3)
    assert done.wrong == []
    assert done.streams > 20
    assert done.gaps
