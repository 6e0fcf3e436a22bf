"""A short soak; the long one is a command, `python -m tests.chaos.soak`."""

from tests.chaos.soak import soak


def test_a_short_soak_loses_and_doubles_nothing() -> None:
    done = soak(6, seed=3)
    assert done.wrong == []
    assert done.streams > 20
    assert done.gaps
