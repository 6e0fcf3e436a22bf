"""Prompts that begin with tokens which see each other in both directions: these are computed in one step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from scheduler.settings import SchedulerSettings
from scheduler.slices import Slices
from tests.scheduler.executor import LawBroken
from tests.scheduler.test_transferred_pages import run
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples


def bidirectional(workload: Workload) -> Workload:
    """The workload with bidirectional prefixes, each as long as its prompt and a step allow."""
    most = min(workload.settings.step_tokens, workload.settings.chunk)

    def of(arrival: Arrival) -> Arrival:
        request = arrival.request
        scope = replace(request.scope, bidirectional=min(len(request.prompt), most))
        return replace(arrival, request=replace(request, scope=scope))

    return replace(workload, arrivals=tuple(map(of, workload.arrivals)))


@settings(max_examples=examples(100), deadline=None)
@given(workloads(resumed=True))
def test_a_bidirectional_prefix_is_never_divided(workload: Workload) -> None:
    """`FakeExecutor` looks: neither the budget that others leave nor a chunk or a cached prefix divides it."""
    run(bidirectional(workload), which=[False])


def crowded() -> Workload:
    """Three prompts of 6 tokens in steps of 8."""
    come = [Arrival(i, 0, make_request(i, 6, 3)) for i in (1, 2, 3)]
    return bidirectional(Workload(tuple(come), make_layout(2), 40, SchedulerSettings(8, 3)))


def test_harness_catches_a_budget_that_divides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Slices.fits
    monkeypatch.setattr(Slices, "fits", lambda self, start, whole: fits(self, start, 0))
    with pytest.raises(LawBroken, match="row 1 divides its bidirectional prefix of 6 tokens at 2"):
        run(crowded(), which=[False])
