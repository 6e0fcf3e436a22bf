"""Every order in which a few requests are admitted, computed, forked, preempted and ended keeps all laws.

The walk is over the classes that serve; evictions happen by themselves where pages are short. The counts are of states
that differ in more than the numbers of pages, rows and steps.
"""

import pytest

from cache_manager.block_hash import Scope
from tests.cache_manager.exploration import Bounds, Request, explore
from tests.cache_manager.windows import Windows, full

ALIKE = [Request((0, 0, 0, 0)), Request((0, 0, 1)), Request((0, 0, 0, 0, 1))]
TALKING = [Request((0, 0, 0), answer=2), Request((0, 0, 1), answer=2)]


@pytest.mark.parametrize(
    ("requests", "pages", "rows", "windows", "bounds", "states"),
    [
        pytest.param(ALIKE, 5, 3, full(1), Bounds(), 1_400, id="three requests that start alike"),
        pytest.param(
            [*TALKING[:1], Request((0, 0, 0)), Request((0, 0, 1))], 5, 2, full(1), Bounds(), 1_800, id="decodes"
        ),
        pytest.param(
            [Request((0, 0, 0), answer=2), Request((0, 0, 0))],
            6,
            2,
            full(1),
            Bounds(chunks=True, resets=1),
            3_000,
            id="chunks and a reset",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [Request((0, 0, 0), answer=2), Request((0, 0, 1))],
            6,
            2,
            full(2),
            Bounds(forks=1),
            1_100,
            id="a fork in two layer groups",
        ),
        pytest.param(
            ALIKE, 5, 3, full(1), Bounds(forks=1), 25_000, id="three requests and a fork", marks=pytest.mark.slow
        ),
        pytest.param(
            [
                Request((0, 0, 0), scope=Scope(public=2)),
                Request((0, 0, 0), scope=Scope("other", public=2)),
                Request((0, 0, 0), scope=Scope(bidirectional=3)),
            ],
            4,
            2,
            full(1),
            Bounds(),
            300,
            id="tenants, a public page and a span that hits whole",
        ),
    ],
)
@pytest.mark.sample(2)
def test_all_orders_of_a_few_requests(requests, pages, rows, windows, bounds, states):
    """About 33,000 states altogether."""
    found = explore(requests, pages, rows, bounds, windows)
    print(f"{found:,} states")
    assert found >= states


LONG = [Request((0,) * 7), Request((0,) * 4 + (1,) * 3), Request((0,) * 6)]
DECODING = [Request((0,) * 6, answer=2), Request((0,) * 4 + (1,))]


@pytest.mark.parametrize(
    ("requests", "pages", "windows", "bounds", "states"),
    [
        pytest.param(
            LONG, 9, Windows((None, 2), 2), Bounds(), 3_000, id="full attention beside a window", marks=pytest.mark.slow
        ),
        pytest.param(DECODING, 9, Windows((3, None), 3), Bounds(chunks=True), 1_700, id="chunks and a window"),
        pytest.param(DECODING, 8, Windows((3, 3), 3), Bounds(resets=1), 800, id="equal windows only, and a reset"),
        pytest.param(DECODING, 7, Windows((3, 2), 2), Bounds(), 400, id="different windows only"),
        pytest.param(DECODING, 4, Windows((2,), 2), Bounds(preemptions=1), 3_800, id="a window only"),
    ],
)
@pytest.mark.slow
def test_all_orders_with_windows(requests, pages, windows, bounds, states):
    """About 9,000 states altogether."""
    found = explore(requests, pages, 2, bounds, windows)
    print(f"{found:,} states")
    assert found >= states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "pages", "windows", "bounds", "states"),
    [
        pytest.param(
            [Request((0,) * 5, answer=3), Request((0,) * 6)],
            9,
            Windows((2, None), 3),
            Bounds(forks=1),
            8_600,
            id="a fork in a window and beside it",
        ),
        pytest.param(LONG, 8, Windows((3, 2), 2), Bounds(), 7_600, id="different windows only"),
    ],
)
def test_all_orders_of_more_with_windows(requests, pages, windows, bounds, states):
    """About 16,000 states altogether."""
    found = explore(requests, pages, 2, bounds, windows)
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
            8_100,
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
