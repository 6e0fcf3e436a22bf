"""Bugs planted in the cache manager: the models, the ledger or the walk must notice each of them."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_manager.allocator import LedgerError
from tests.cache_manager.books import AllocatorBooks
from tests.cache_manager.exploration import Bounds, Request, explore
from tests.cache_manager.faults import FAULTS
from tests.cache_manager.faults_of_names import SHORT_NAMES
from tests.cache_manager.faults_of_windows import WINDOWED
from tests.cache_manager.long_run import episode
from tests.cache_manager.windows import Windows

EPISODES = 60
CAUGHT = (AssertionError, LedgerError, LookupError)  # the last one: books that cannot be read any more


def allocator() -> None:
    # Nothing but searching: the failure need not be made small, and the same search runs each time.
    search = settings(
        max_examples=200, stateful_step_count=40, derandomize=True, database=None, phases=[Phase.generate]
    )
    run_state_machine_as_test(AllocatorBooks, settings=search)


def play() -> None:
    for seed in range(EPISODES):
        episode(seed, operations=300, a_check=3)


def collisions() -> None:
    for seed in range(EPISODES):
        episode(seed, operations=300, a_check=3, collisions=True)


def windows() -> None:
    for seed in range(EPISODES):
        episode(seed, operations=300, a_check=3, kinds=("hybrid", "pure"))


CATCHERS = {"allocator": allocator, "play": play, "collisions": collisions, "windows": windows}


@pytest.mark.parametrize("name", FAULTS)
def test_harness_catches(name, monkeypatch):
    FAULTS[name].plant(monkeypatch)
    with pytest.raises(CAUGHT):
        CATCHERS[FAULTS[name].catcher]()


def test_enough_is_planted():
    assert len(FAULTS) >= 50 + len(WINDOWED) >= 80


LONG = Request((0, 0, 0), answer=2)
SHORT = Request((0, 0, 0))
WALKS = {
    "drop_skips_a_decrement": ([LONG, SHORT], 3, Bounds(forks=1)),
    "step_in_flight_is_forgotten": ([LONG, SHORT], 3, Bounds(forks=1)),
    "pages_return_a_step_too_early": ([LONG, SHORT], 3, Bounds(forks=1)),
    "pages_never_return": ([LONG, SHORT], 3, Bounds(forks=1)),
    "freed_pages_are_told_too_early": ([LONG, SHORT], 3, Bounds(forks=1)),
    "cached_page_is_told_to_be_freed": ([LONG, SHORT], 3, Bounds(forks=1)),
    "page_is_published_before_it_is_computed": ([Request((0,) * 5), Request((0,) * 5)], 6, Bounds(chunks=True)),
    "page_is_taken_over_by_one_of_its_forks_alone": ([LONG, SHORT, Request((0, 0, 1))], 4, Bounds(forks=1)),
    "row_publishes_on": ([LONG, SHORT], 3, Bounds(resets=1)),
    "node_outlives_a_reset": ([LONG, SHORT], 3, Bounds(resets=1)),
    "bound_of_a_match_is_ignored": ([Request((0,) * 4), Request((0,) * 4)], 4, Bounds()),
    "fork_holds_nothing": ([LONG, SHORT], 3, Bounds(forks=1)),
    "copy_is_forgotten": ([LONG, SHORT], 3, Bounds(forks=1)),
    "page_is_evicted_before_those_that_come_after_it": (
        [Request((0,) * 5), Request((0, 0, 1)), Request((1, 0, 0))],
        3,
        Bounds(),
    ),
}


@pytest.mark.parametrize("name", WALKS)
def test_walk_catches(name, monkeypatch):
    """The exhaustive walk finds these by itself, in a small pool."""
    FAULTS[name].plant(monkeypatch)
    requests, pages, bounds = WALKS[name]
    with pytest.raises(CAUGHT):
        explore(requests, pages, rows=3, bounds=bounds)


ALIKE = [Request((0,) * 7), Request((0,) * 4 + (1,) * 3), Request((0,) * 6)]


@pytest.mark.parametrize(("windows", "pages"), [((None, 4), 9), ((4,), 4)], ids=["beside full attention", "alone"])
@pytest.mark.parametrize(
    "name",
    [
        "window_is_one_too_short",
        "page_behind_a_window_stays_held_for_ever",
        "page_behind_a_window_is_freed_though_it_has_a_name",
        "pages_behind_windows_go_last",
        "name_is_kept_after_the_page_was_given_away",
        "page_that_is_lacking_in_a_window_is_overlooked",
        "lost_page_is_not_found_again_once_it_is_computed_anew",
        "nothing_is_promised",
    ],
)
def test_walk_with_windows_catches(name, windows, pages, monkeypatch):
    FAULTS[name].plant(monkeypatch)
    with pytest.raises(CAUGHT):
        explore(ALIKE, pages, rows=2, bounds=Bounds(), windows=Windows(windows, ahead=2))


def test_names_that_collide_never_lead_to_another_ones_pages(monkeypatch):
    SHORT_NAMES.plant(monkeypatch)
    collisions()
