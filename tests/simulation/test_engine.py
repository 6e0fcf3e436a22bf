"""An engine on a virtual clock does what a clock and a scheduler would, at the same moments."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cache_manager.layout import KVLayout
from rpc.simulation.cluster import fillers
from rpc.simulation.engine import SimulatedEngine
from rpc.simulation.served import Ledger
from scheduler.blueprint import Blueprint
from scheduler.controls import Controls, LogitsParams
from scheduler.events import EndReason, Submit
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step_costs import StepCosts
from tests.scheduler.workloads import make_request

COSTS = StepCosts(0.01, 0.001, 1e-5, 1e-4, 0.0)
LAYOUT = KVLayout.uniform(((0,),), kv_heads=1, head_dim=8, element_bytes=2, page_size=16)


def made(depth: int = 1, wait: float = 30.0, **changed: int) -> Blueprint:
    settings = replace(SchedulerSettings(64, 8, steps_in_flight=depth), **changed)
    return Blueprint(settings, QueueLimits(wait=wait), LAYOUT, 100, "lru")


def drive(engine: SimulatedEngine, ledger: Ledger, until: float = math.inf) -> float:
    """Wakes an engine at its moments. Returns the last one."""
    now = 0.0
    while engine.due <= until and engine.due < math.inf:
        now = engine.due
        engine.wake(now, partial(ledger.take, now=now))
    return now


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_alone_takes_its_steps(depth: int) -> None:
    """100 tokens in steps of 64, and then a decode for each token after the first."""
    ledger = Ledger(1)
    engine = SimulatedEngine(made(depth), COSTS, fillers(ledger))
    ledger.arrive(0, 2.0)
    engine.put(Submit(0, make_request(0, 100, 4)), 2.0)
    end = drive(engine, ledger)
    first = 2.0 + 2 * 0.01 + 100 * 1e-4
    decodes = [0.01 + 0.001 + seen * 1e-5 for seen in (101, 102, 103)]
    assert ledger.first[0] == pytest.approx(first)
    assert ledger.gaps.tolist() == pytest.approx(decodes)
    assert end == pytest.approx(first + sum(decodes))
    assert (ledger.tokens[0], ledger.reasons) == (4, {0: EndReason.LENGTH})
    assert engine.busy_until(end) == pytest.approx(end - 2.0)


def test_what_comes_during_a_step_waits_for_its_end() -> None:
    ledger = Ledger(2)
    engine = SimulatedEngine(made(), COSTS, fillers(ledger))
    for number, at in ((0, 0.0), (1, 0.005)):
        drive(engine, ledger, at)
        ledger.arrive(number, at)
        engine.put(Submit(number, make_request(number, 20, 2)), at)
    drive(engine, ledger)
    begins = 0.01 + 20 * 1e-4  # the end of the first one's prefill
    assert ledger.first[1] == pytest.approx(begins + 0.01 + 20 * 1e-4 + 0.001 + 21 * 1e-5)


def test_steps_of_a_slow_engine_take_longer() -> None:
    times = []
    for slowness in (1.0, 3.0):
        ledger = Ledger(1)
        engine = SimulatedEngine(made(), COSTS, fillers(ledger))
        engine.slowed.append(slowness)
        ledger.arrive(0, 0.0)
        engine.put(Submit(0, make_request(0, 20, 5)), 0.0)
        times.append(drive(engine, ledger))
    assert times[1] == pytest.approx(3 * times[0])


def test_who_waits_too_long_is_refused() -> None:
    ledger = Ledger(2)
    engine = SimulatedEngine(made(wait=0.2, max_sequences=1, max_batched_tokens=16), COSTS, fillers(ledger))
    for number in range(2):
        ledger.arrive(number, 0.0)
        engine.put(Submit(number, make_request(number, 16, 400)), 0.0)
    drive(engine, ledger)
    assert ledger.reasons == {0: EndReason.LENGTH, 1: EndReason.QUEUE_TIMEOUT}


def test_nothing_is_due_without_work() -> None:
    engine = SimulatedEngine(made(), COSTS, fillers(Ledger(0)))
    assert engine.due == math.inf


def test_a_held_request_is_served_though_it_was_preempted() -> None:
    """It is held again then, as its grammar might have been evicted."""
    ledger = Ledger(4)
    few = replace(made(), pages=40)
    engine = SimulatedEngine(few, COSTS, fillers(ledger), ready_after=lambda _: 0.5)
    grammar = Controls(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, logits_params=LogitsParams(grammar="x"))
    for number in range(4):
        ledger.arrive(number, 0.0)
        engine.put(Submit(number, replace(make_request(number, 100, 200), controls=grammar)), 0.0)
    drive(engine, ledger, 1e4)
    assert ledger.reasons == dict.fromkeys(range(4), EndReason.LENGTH)
    assert engine.scheduler.stats().preemptions > 0
    assert np.nanmin(ledger.first) > 0.5


def test_a_step_that_is_cut_off_is_busy_until_then() -> None:
    ledger = Ledger(1)
    engine = SimulatedEngine(made(), COSTS, fillers(ledger))
    ledger.arrive(0, 1.0)
    engine.put(Submit(0, make_request(0, 20, 5)), 1.0)
    engine.wake(1.0, partial(ledger.take, now=1.0))
    assert engine.busy_until(1.004) == pytest.approx(0.004)
