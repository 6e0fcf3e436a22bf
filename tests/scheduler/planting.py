"""Plants a bug where the scheduler or the cache manager would have none, and searches for a workload that shows it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import Phase, given, seed, settings

from cache_manager.allocator import LedgerError
from tests.scheduler.driver import BROKEN, SchedulerDriver
from tests.scheduler.room import Room
from tests.scheduler.workloads import Workload, workloads
from tests.support.planted import plant


@dataclass(frozen=True)
class Fault:
    """stand_in: makes one for target.name from the original. workload: what shows it. cache: with the prefix cache.
    blind: only the executor looks, not what is counted of pages beside it.
    """

    target: Any
    name: str
    stand_in: Callable
    workload: dict[str, Any]
    cache: bool = True
    blind: bool = False

    def plant(self, monkeypatch) -> None:
        plant(monkeypatch, self.target, self.name, self.stand_in)
        if self.blind:
            for check in ("check_behind_windows", "check_ends", "check_newcomers"):
                monkeypatch.setattr(Room, check, lambda *_: None)


class Faults(dict[str, Fault]):
    """By name, which is that of the function that makes the stand-in."""

    def fault(self, target: Any, name: str, cache: bool = True, blind: bool = False, **workload: Any) -> Callable:
        def register(make):
            self[make.__name__] = Fault(target, name, make, workload, cache, blind)
            return make

        return register


SEARCHES = 6  # of 500 workloads each; most faults are caught in the first few workloads of the first


def trace_twice(workload: Workload) -> None:
    """Runs a workload under the laws that `SchedulerDriver` checks, twice with equal traces."""
    assert SchedulerDriver(workload).run().trace == SchedulerDriver(workload).run().trace


def caught(fault: Fault, monkeypatch, drawn=workloads, run: Callable[[Workload], None] = trace_twice) -> bool:
    """Whether a law fails in some workload. Each call searches alike.

    drawn: makes the strategy of workloads, from what the fault needs. run: runs one under the laws.
    """
    fault.plant(monkeypatch)
    found: list[BaseException] = []
    for number in range(SEARCHES):
        # A seed of its own, since Hypothesis derives one from the source of the function: an edit would search others.
        # Nothing but searching: the failure need not be made small.
        @seed(number)
        @settings(max_examples=500, deadline=None, database=None, phases=[Phase.generate])
        @given(drawn(**fault.workload))
        def search(workload):
            try:
                run(workload if fault.cache else workload.without_cache())
            except BROKEN as broken:
                found.append(broken)
                raise

        with suppress(AssertionError, ExceptionGroup, LedgerError):  # hypothesis says in its own way what it has found
            search()
        if found:
            return True
    return False
