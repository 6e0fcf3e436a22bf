"""Random operations keep all laws: 100,000 here, as many as you like with python -m tests.cache_manager.long_run."""

from collections import Counter

import pytest

from cache_manager.cached import PrefixCache
from cache_manager.prefix import PrefixIndex
from cache_manager.tables import PageTables
from tests.cache_manager.long_run import run

RARE = {
    "pages left a window": (PageTables, "cut"),
    "pages that had left one were evicted": (PrefixCache, "_evict_slid"),
    "ends of sequences were evicted": (PrefixCache, "_idle_run"),
    "pages were evicted of nodes that were held": (PrefixCache, "_reach_all"),
    "a node without pages was found to be of no use, or not": (PrefixCache, "_empty_leaf"),
    "a lost page was computed anew": (PrefixIndex, "bind"),
    "rows forgot what was distrusted": (PrefixCache, "forget"),
}


@pytest.fixture
def happened(monkeypatch):
    """Counts how often each of the above happened."""
    counts: Counter[str] = Counter()

    def counted(what, real):
        def call(self, *arguments):
            counts[what] += 1
            return real(self, *arguments)

        return call

    for what, (target, name) in RARE.items():
        monkeypatch.setattr(target, name, counted(what, getattr(target, name)))
    return counts


@pytest.mark.slow
def test_a_hundred_thousand_operations(happened):
    done = []
    assert run(100_000, seed=7, progress=done.append) == 20
    assert done[-1] == 100_000
    print(dict(happened))
    assert all(happened[what] >= 20 for what in RARE), happened
