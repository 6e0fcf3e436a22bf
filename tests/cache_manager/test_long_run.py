"""Random operations keep all laws: 100,000 here, as many as you like with python -m tests.cache_manager.long_run."""

from tests.cache_manager.long_run import run


def test_a_hundred_thousand_operations():
    done = []
    assert run(100_000, seed=7, progress=done.append) == 20
    assert done[-1] == 100_000
