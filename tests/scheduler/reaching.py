"""Do drawn workloads come to what the laws speak of? Laws over workloads that never preempt say nothing of it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from hypothesis import Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.workloads import Workload

Run = TypeVar("Run")
AT_MOST = 2000  # the rarest comes in one workload of several hundred, and the search ends when all have come


class _AllReachedError(Exception):
    """Ends the search: drawing the workloads that are left costs as much as running them."""


def unreached(drawn: SearchStrategy[Workload], notes: Mapping[str, Callable[[SchedulerDriver], object]]) -> set[str]:
    """Notes that no drawn workload reaches; each call draws alike."""
    return unreached_runs(drawn.map(lambda workload: SchedulerDriver(workload).run()), notes)


def unreached_runs(drawn: SearchStrategy[Run], notes: Mapping[str, Callable[[Run], object]]) -> set[str]:
    """Notes that no drawn run reaches."""
    left = set(notes)

    @settings(max_examples=AT_MOST, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(drawn)
    def search(run: Run) -> None:
        left.difference_update([note for note in left if notes[note](run)])
        if not left:
            raise _AllReachedError

    with suppress(_AllReachedError):
        search()
    return left
