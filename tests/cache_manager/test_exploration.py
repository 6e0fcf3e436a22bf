"""Every order in which a few requests are admitted, computed, forked, preempted and ended keeps all laws.

The walk is over the classes that serve; evictions happen by themselves where pages are short. The counts are of states
that differ in more than the numbers of pages, rows and steps.
"""

import pytest

from cache_manager.page_names import Scope
from tests.cache_manager.exploration import Bounds, Request, explore

ALIKE = [Request((0, 0, 0, 0)), Request((0, 0, 1)), Request((0, 0, 0, 0, 1))]
TALKING = [Request((0, 0, 0), answer=2), Request((0, 0, 1), answer=2)]


@pytest.mark.parametrize(
    ("requests", "pages", "rows", "groups", "bounds", "states"),
    [
        pytest.param(ALIKE, 5, 3, 1, Bounds(), 1_400, id="three requests that start alike"),
        pytest.param([*TALKING[:1], Request((0, 0, 0)), Request((0, 0, 1))], 5, 2, 1, Bounds(), 1_800, id="decodes"),
        pytest.param(
            [Request((0, 0, 0), answer=2), Request((0, 0, 0))],
            6,
            2,
            1,
            Bounds(chunks=True, resets=1),
            3_000,
            id="chunks and a reset",
        ),
        pytest.param(
            [Request((0, 0, 0), answer=2), Request((0, 0, 1))],
            6,
            2,
            2,
            Bounds(forks=1),
            1_100,
            id="a fork in two layer groups",
        ),
        pytest.param(
            [
                Request((0, 0, 0), scope=Scope(public=2)),
                Request((0, 0, 0), scope=Scope("other", public=2)),
                Request((0, 0, 0), scope=Scope(whole=3)),
            ],
            4,
            2,
            1,
            Bounds(),
            300,
            id="tenants, a public page and a span that hits whole",
        ),
    ],
)
def test_all_orders_of_a_few_requests(requests, pages, rows, groups, bounds, states):
    """About 8,000 states altogether."""
    found = explore(requests, pages, rows, bounds, groups)
    print(f"{found:,} states")
    assert found >= states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "pages", "rows", "bounds", "states"),
    [
        pytest.param(
            [Request((0, 0, 0)), Request((0, 0, 1)), Request((0, 0, 0, 0, 1))],
            5,
            3,
            Bounds(preemptions=1),
            8_500,
            id="three requests and a preemption",
        ),
        pytest.param(TALKING, 5, 3, Bounds(forks=1), 20_000, id="a fork of requests that decode"),
    ],
)
def test_all_orders_of_more(requests, pages, rows, bounds, states):
    """About 29,000 states altogether."""
    found = explore(requests, pages, rows, bounds)
    print(f"{found:,} states")
    assert found >= states
