"""Bugs planted in the cache manager: the models, the ledger or the walk must notice each of them."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_manager.allocator import LedgerError
from tests.cache_manager.books import AllocatorBooks
from tests.cache_manager.exploration import Bounds, Request, explore
from tests.cache_manager.faults import FAULTS
from tests.cache_manager.faults_of_hashes import SHORT_NAMES
from tests.cache_manager.faults_of_windows import WINDOWED
from tests.cache_manager.long_run import episode
from tests.cache_manager.windows import Windows
from tests.support.planted import planted

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


def collisions(episodes: int = EPISODES) -> None:
    for seed in range(episodes):
        episode(seed, operations=300, a_check=3, collisions=True)


def windows() -> None:
    for seed in range(EPISODES):
        episode(seed, operations=300, a_check=3, kinds=("hybrid", "pure"))


RARE = {
    "page_that_a_fork_shares_is_never_taken_over",
    "page_that_left_the_window_of_a_fork_is_exchanged",
    "lack_a_page_of_the_first_group_alone",
    "distrusted_row_is_asked_for_what_it_still_holds_alone",
    "page_is_taken_over_by_one_of_its_forks_alone",
    "held_page_is_evicted",
    "last_resort_takes_what_is_held",
    "row_lets_go_of_the_page_that_it_goes_on_from",
    "page_that_was_forgotten_stays_in_line",
    "page_that_was_set_aside_stays_on_the_free_list",
    "page_is_thought_to_be_here_though_a_group_lost_it",
}

CATCHERS = {"allocator": allocator, "play": play, "collisions": collisions, "windows": windows}


@pytest.mark.parametrize("name", planted(FAULTS, RARE))
@pytest.mark.sample(2)
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
    planted(
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
        rare={
            "name_is_kept_after_the_page_was_given_away",
            "page_behind_a_window_is_freed_though_it_has_a_name",
            "page_behind_a_window_stays_held_for_ever",
            "pages_behind_windows_go_last",
        },
    ),
)
@pytest.mark.slow
def test_walk_with_windows_catches(name, windows, pages, monkeypatch):
    FAULTS[name].plant(monkeypatch)
    with pytest.raises(CAUGHT):
        explore(ALIKE, pages, rows=2, bounds=Bounds(), windows=Windows(windows, ahead=2))


@pytest.mark.parametrize("episodes", [15, pytest.param(EPISODES, marks=pytest.mark.slow)])
def test_names_that_collide_never_lead_to_another_ones_pages(episodes, monkeypatch):
    """`collisions` raises where a page of another prefix is read."""
    SHORT_NAMES.plant(monkeypatch)
    collisions(episodes)
