"""Results of a step that reach a sequence, or the queue's estimate, and those that must not."""

from dataclasses import replace

import numpy as np

from scheduler.events import Abort, Submit
from scheduler.parameters import Beam
from scheduler.settings import SchedulerSettings
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.executor import logprobs_of
from tests.scheduler.test_scheduler import engine, result_of, step
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request


def test_prompt_logprobs_of_a_sequence_that_has_left_reach_nobody():
    scheduler = engine(rows=1, depth=2)
    first = scheduler.schedule(0.0, [Submit(1, make_request(1))])
    scheduler.schedule(1.0, [Abort(1), Submit(2, make_request(2))])
    assert scheduler.rows.row_of(2) == 0, "it has the row of the one before"
    part = (0, 1, logprobs_of(np.array([1, 2, 3])))
    outputs = scheduler.commit(replace(result_of(first, [1]), prompt_parts=(part,)), 2.0)
    assert outputs.prompt_parts == ()


def test_prompt_logprobs_of_a_sequence_that_runs_are_told():
    scheduler = engine()
    plan = scheduler.schedule(0.0, [Submit(7, make_request(7))])
    part = (0, 1, logprobs_of(np.array([1, 2, 3])))
    outputs = scheduler.commit(replace(result_of(plan, [1]), prompt_parts=(part,)), 1.0)
    assert [(one.attempt, one.start) for one in outputs.prompt_parts] == [(7, 1)]


def observed(scheduler):
    """Lengths of outputs, as the estimate of waiting times is told of them."""
    lengths = []
    scheduler.backpressure.observe_output = lambda tokens, request=None: lengths.append(tokens)
    return lengths


def test_the_estimate_is_told_how_long_outputs_are():
    scheduler = engine()
    lengths = observed(scheduler)
    step(scheduler, 0.0, [Submit(1, make_request(1, 4, 3)), Submit(2, make_request(2, 4, 1))])
    while scheduler.has_work:
        step(scheduler)
    assert lengths == [1, 3]


def test_the_estimate_is_told_of_what_a_search_has_found():
    request = replace(make_request(1, 4, 3), beam=Beam(2, 1.0), count=2)
    request = replace(request, controls=replace(request.controls, top_logprobs=4))
    settings = SchedulerSettings(max_batched_tokens=64, max_sequences=4)
    drive = SchedulerDriver(Workload((Arrival(1, 0, request),), make_layout(4), 32, settings))
    lengths = observed(drive.scheduler)
    drive.run()
    assert lengths == [3, 3]
