"""The laws over drawn workloads of attempts with several sequences, and of searches, beside plain ones.

`SchedulerDriver` checks in every turn that each sequence is in one place. At the end its tokens are those of a run
without others, a search has found what the plain definition finds, and no sequence has left anything behind.
"""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings

from scheduler.events import EndReason
from scheduler.request import Beam, Request
from scheduler.settings import SchedulerSettings
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.executor import VOCABULARY, alone
from tests.scheduler.reaching import unreached
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, stem, workloads
from tests.support.examples import examples

few = settings(max_examples=examples(60), deadline=None)
many = settings(max_examples=examples(150), deadline=None)


def searches(drive: SchedulerDriver) -> list:
    return [told for told in drive.told.values() if told.arrival.request.beam is not None]


def ends(drive: SchedulerDriver) -> set[tuple[bool, EndReason]]:
    """Returns the ends of attempts with several sequences, and of searches."""
    several = [told for told in drive.told.values() if told.arrival.rows > 1]
    return {(one.arrival.request.beam is not None, end.reason) for one in several for end in one.ends.values()}


NOTES = {
    "preempted": lambda drive: drive.stats.preemptions > 0,
    "a hypothesis was parked": lambda drive: drive.suspended > 0,
    "two searches at once": lambda drive: len(searches(drive)) > 1,
    "a search with windows": lambda drive: searches(drive) and drive.workload.layout.windows,
    "two steps in flight": lambda drive: searches(drive) and drive.workload.depth == 2,
    "searches that fit in no rows together": lambda drive: (
        sum(told.arrival.rows for told in searches(drive)) > drive.workload.settings.max_sequences
    ),
    "one was finished and others went on": lambda drive: any(
        end.reason is EndReason.FINISHED and end.more for told in drive.told.values() for end in told.ends.values()
    ),
    "one went on and others had ended": lambda drive: any(
        None in a.emitted and a.open for a in drive.workload.arrivals
    ),
    **{
        f"{'a search' if search else 'several'}: {reason.value}": lambda drive, one=(search, reason): one in ends(drive)
        for search in (False, True)
        for reason in (EndReason.STOP, EndReason.LENGTH, EndReason.FINISHED, EndReason.FAULT, EndReason.QUEUE_TIMEOUT)
    },
    "several: stuck": lambda drive: (False, EndReason.STUCK) in ends(drive),
}


@pytest.mark.slow
def test_drawn_workloads_reach_what_the_laws_speak_of():
    drawn = (
        workloads(several=True)
        | workloads(several=True, cancels=True, resumed=True, queue_timeout=True)
        | workloads(several=True, faults=True)
    )
    assert unreached(drawn, NOTES) == set()


@many
@given(workloads(several=True))
def test_tokens_do_not_depend_on_the_schedule(workload):
    told = SchedulerDriver(workload).run().told
    assert all(end.reason in (EndReason.STOP, EndReason.LENGTH) for one in told.values() for end in one.ends.values())


@few
@given(workloads(several=True))
def test_tokens_do_not_depend_on_the_schedule_without_a_prefix_cache(workload):
    SchedulerDriver(workload.without_cache()).run()


def family(attempt: int, prompt: tuple[int, ...], most: int, count: int = 1, turn: int = 0, **more) -> Arrival:
    return Arrival(attempt, turn, replace(make_request(attempt, prompt, most), count=count), **more)


def search(attempt: int, prompt: tuple[int, ...], stop_ids: tuple[int, ...]) -> Request:
    request = make_request(attempt, prompt, 5, stop_ids)
    return replace(request, beam=Beam(3, 2.0), count=3, controls=replace(request.controls, top_logprobs=VOCABULARY - 1))


HYBRID = make_layout(1, windows=(None, 4))
ROOM = SchedulerSettings(max_batched_tokens=73, max_sequences=16, steps_in_flight=2)
STEM = stem([1, 2, 3, 4, 5], 12)
TWINS_COMPUTE_WHAT_LEFT_A_WINDOW = Workload(
    # The first pages of attempt 1 leave its window and are evicted; attempt 3 waits for those that attempt 2 computes.
    (family(1, STEM, 2, count=2), family(2, (1, 2), 2, count=2), family(3, (1, 2), 1)),
    HYBRID,
    27,
    ROOM,
)
PARENT_OF_WHAT_IS_AWAITED_LEAVES = Workload(
    # Sequence 1 waits for pages of sequence 0, which is dropped when sequence 2 has gone on from these.
    (family(1, (1, 2), 2, count=3, turn=1, emitted=(0, 1, 0), dropped=((2, 0),)),),
    HYBRID,
    100,
    ROOM,
)
DROPPED_AS_IT_COMES = Workload(
    # The first sequence of attempt 3 is dropped in its first turn: the next one takes its place in the queue.
    (
        family(1, tuple(range(1, 10)), 3, turn=1),
        family(2, (1,), 1, turn=5),
        family(3, STEM[1:10], 1, count=4, turn=5, dropped=((5, 0),)),
    ),
    make_layout(2, windows=(5, None)),
    27,
    replace(ROOM, prefill_chunk=8),
)

CHILD_LACKS_A_ROW = Workload(
    # Four of the six best first tokens are stop tokens, so two hypotheses go on and leave the third row to attempt 2.
    # The next round forks one of them: the child waits, and computes again what its parent holds.
    (
        Arrival(1, 0, search(1, (7, 8), stop_ids=(12, 9, 7, 3))),
        family(2, (1, 2), 12, turn=1),
    ),
    make_layout(4),
    60,
    SchedulerSettings(max_batched_tokens=20, max_sequences=3),
)


@many
@given(workloads(several=True, cancels=True, resumed=True))
@example(TWINS_COMPUTE_WHAT_LEFT_A_WINDOW)
@example(PARENT_OF_WHAT_IS_AWAITED_LEAVES)
@example(DROPPED_AS_IT_COMES)
def test_sequences_end_and_resume_one_by_one(workload):
    SchedulerDriver(workload).run()


@few
@given(workloads(several=True, faults=True))
def test_a_fault_ends_all_sequences_of_its_attempt_alone(workload):
    SchedulerDriver(workload).run()


@few
@given(workloads(several=True, cancels=True, queue_timeout=True, resumed=True, faults=True, resets=True, last_turn=20))
def test_all_of_it_at_once_the_same_byte_for_byte(workload):
    assert SchedulerDriver(workload).run().trace == SchedulerDriver(workload).run().trace


@few
@given(workloads(several=True, roomy=True, depths=(1,)))
def test_a_prompt_is_computed_once_for_all_its_sequences(workload):
    """Also without a prefix cache, where pool and rows hold everything: a search that lacks a row computes again."""
    stats = SchedulerDriver(workload.without_cache()).run().stats
    plain = [a for a in workload.arrivals if a.request.beam is None]
    prompts = sum(len(a.request.prompt) for a in workload.arrivals)
    decodes = sum(len(alone(a.request, index)) - 1 for a in plain for index in a.open)
    searched = sum(a.rows * (a.request.max_tokens - 1) for a in workload.arrivals if a.request.beam is not None)
    assert (stats.preemptions, stats.recomputed_tokens) == (0, 0)
    assert prompts + decodes <= stats.computed_tokens <= prompts + decodes + searched


@few
@given(workloads(several=True, depths=(1,)))
@example(CHILD_LACKS_A_ROW)
def test_all_that_is_computed_twice_is_counted_as_recomputed(workload):
    """The rest is what an engine with room for all computes, of searches too. With a step in flight behind
    another, what is planned before an end is known is computed in vain, and how much of it depends on the batch.
    """
    tight = workload.without_cache()
    rows = replace(tight.settings, max_sequences=40, max_batched_tokens=200)
    roomy = SchedulerDriver(replace(tight, pages=20 * tight.pages + 2000, settings=rows)).run().stats
    stats = SchedulerDriver(tight).run().stats
    assert roomy.recomputed_tokens == 0
    assert stats.computed_tokens - stats.recomputed_tokens == roomy.computed_tokens
