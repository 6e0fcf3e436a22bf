"""The intervals of a request add up to its latency, and say what it waited for."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.events import EndReason
from scheduler.explaining import NANOSECONDS, WAITING, Explanation, Lack, TimelinePhase
from scheduler.preemption_cause import PreemptionCause
from scheduler.replaying import Recording
from scheduler.settings import SchedulerSettings
from tests.scheduler.recorded import RecordedDriver, played
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples


class TimedDriver(RecordedDriver):
    """Notes the turn in which each attempt ends.

    Attributes:
        ends: Turn and reason by attempt.
    """

    def __init__(self, workload: Workload, tokens: bool = False) -> None:
        super().__init__(workload, tokens)
        self.ends: dict[int, tuple[int, EndReason]] = {}

    def next_turn(self):
        turn = self.turn
        outputs = super().next_turn()
        for end in () if outputs is None else outputs.ends:
            if not end.more:
                self.ends[end.attempt] = turn, end.reason
        return outputs


def explained(workload: Workload, asked: int | None = None, tokens: bool = False) -> tuple[Explanation, TimedDriver]:
    drive = TimedDriver(workload, tokens)
    drive.run()
    return Explanation(Recording.parse(drive.lines), asked), drive


def check(workload: Workload, tokens: bool = False) -> None:
    found, drive = explained(workload, workload.arrivals[-1].attempt, tokens)
    assert found.replay.difference is None
    assert found.timelines.keys() == drive.ends.keys()
    for arrival in workload.arrivals:
        one, (turn, reason) = found.timelines[arrival.attempt], drive.ends[arrival.attempt]
        assert one.ended == reason.value
        assert one.latency == (turn - arrival.turn) * NANOSECONDS
        assert sum(one.split().values()) == one.latency
        assert one.intervals[0].start - found.began == arrival.turn * NANOSECONDS
        assert all(before.end == after.start for before, after in pairwise(one.intervals))
        assert one.output == sum(map(len, drive.told[arrival.attempt].outputs.values()))
        for interval in one.intervals:
            spent = interval.end - interval.start
            assert interval.lacks.total() in (0, spent)
            assert not interval.causes or interval.phase in WAITING[1:]
            assert all(0 < meanwhile <= spent for meanwhile in interval.behind.values())


@settings(max_examples=examples(80), deadline=None)
@given(workloads(cancels=True, queue_timeout=True, resumed=True, faults=True))
def test_intervals_add_up_to_the_latency(workload: Workload) -> None:
    check(workload)


@settings(max_examples=examples(40), deadline=None)
@given(workloads(several=True, cancels=True))
def test_so_do_those_of_several_sequences_and_searches(workload: Workload) -> None:
    check(workload, tokens=True)


def phases(found: Explanation, attempt: int) -> list[tuple[TimelinePhase, int, int, int]]:
    """Returns phase, seconds, steps and tokens of each interval."""
    return [
        (one.phase, (one.end - one.start) // NANOSECONDS, one.steps, one.tokens)
        for one in found.timelines[attempt].intervals
    ]


def test_a_request_waits_for_the_row_of_another() -> None:
    """Steps take a turn, and a prompt of 9 tokens takes three of 4 tokens each."""
    come = (Arrival(1, 0, make_request(1, 9, 4)), Arrival(2, 1, make_request(2, 4, 2)))
    found, _ = explained(Workload(come, make_layout(4), 16, SchedulerSettings(4, 1)), asked=2)
    assert phases(found, 1) == [(TimelinePhase.PREFILL, 3, 3, 9), (TimelinePhase.DECODE, 2, 3, 3)]
    assert phases(found, 2) == [
        (TimelinePhase.QUEUED, 5, 0, 0),
        (TimelinePhase.PREFILL, 1, 1, 4),
        (TimelinePhase.DECODE, 0, 1, 1),
    ]
    waited = found.timelines[2].intervals[0]
    assert waited.lacks == {Lack.ROW: 5 * NANOSECONDS}
    assert waited.behind == {1: 5 * NANOSECONDS}


def test_a_request_waits_for_pages() -> None:
    come = (Arrival(1, 0, make_request(1, 9, 4)), Arrival(2, 1, make_request(2, 9, 2)))
    found, _ = explained(Workload(come, make_layout(4), 5, SchedulerSettings(16, 2)), asked=2)
    waited = found.timelines[2].intervals[0]
    assert waited.phase is TimelinePhase.QUEUED
    assert waited.lacks.keys() == {Lack.PAGES}
    assert waited.behind.keys() == {1}


def test_a_request_loses_its_pages_to_another_and_computes_them_again() -> None:
    come = (Arrival(1, 0, make_request(1, 7, 12)), Arrival(2, 0, make_request(2, 7, 12)))
    workload = Workload(come, make_layout(4), 6, SchedulerSettings(16, 2), prefix_cache=False)
    found, drive = explained(workload, asked=2)
    assert drive.stats.preemptions
    assert [one for one, *_ in phases(found, 1)] == [TimelinePhase.PREFILL, TimelinePhase.DECODE]
    assert [one for one, *_ in phases(found, 2)] == [
        TimelinePhase.PREFILL,
        TimelinePhase.DECODE,
        TimelinePhase.PREEMPTED,
        TimelinePhase.RECOMPUTE,
        TimelinePhase.DECODE,
    ]
    lost = found.timelines[2].intervals[2]
    assert lost.by == (1,)
    assert lost.causes == (PreemptionCause.PAGES,)
    assert lost.behind.keys() == {1}
    assert found.timelines[2].intervals[3].tokens > 7


def test_tokens_that_follow_a_draw_are_decoded() -> None:
    workload = Workload((Arrival(1, 0, make_request(1, 9, 24)),), make_layout(4), 16, SchedulerSettings(16, 2))
    found = Explanation(Recording.parse(played(workload, jumps=5)))
    (prefill, first), (decode, rest) = [(one.phase, one.tokens) for one in found.timelines[1].intervals]
    assert (prefill, decode) == (TimelinePhase.PREFILL, TimelinePhase.DECODE)
    assert (first, rest) == (9, 23)
    assert found.timelines[1].intervals[1].steps < 23


def test_an_output_prefix_is_prefill() -> None:
    come = (Arrival(1, 0, make_request(1, 9, 8), emitted=(4,)),)
    found, _ = explained(Workload(come, make_layout(4), 16, SchedulerSettings(16, 1)))
    assert phases(found, 1)[0] == (TimelinePhase.PREFILL, 1, 1, 13)


@pytest.mark.parametrize("asked", [None, 1])
def test_an_attempt_that_is_open_at_the_end_is_explained_up_to_it(asked: int | None) -> None:
    workload = Workload((Arrival(1, 0, make_request(1, 4, 8)),), make_layout(4), 8, SchedulerSettings(8, 2))
    drive = RecordedDriver(workload)
    drive.run()
    found = Explanation(Recording.parse(drive.lines[:8]), asked)
    assert found.timelines[1].ended == ""
    assert found.timelines[1].latency == 3 * NANOSECONDS


def test_a_cancelled_one_has_its_end_though_a_part_ends_before_that_is_reported() -> None:
    """The cancels of a turn come in two calls, between which a part ends."""
    come = [Arrival(number, 0, make_request(number, 1, number), cancel=1) for number in (2, 3)]
    workload = Workload((Arrival(1, 0, make_request(1, 1, 1)), *come), make_layout(3), 8, SchedulerSettings(3, 1))
    drive = RecordedDriver(replace(workload, amid=True), steps=1)
    drive.run()
    parts = [Explanation(Recording.parse(lines)) for lines in drive.recorded.parts]
    told = [[part.timelines[number].ended for part in parts if number in part.timelines] for number in (1, 2, 3)]
    assert told == [["length"], ["", "finished"], ["", "", "finished"]]


@settings(max_examples=examples(40), deadline=None)
@given(workloads(several=True, cancels=True, resumed=True), st.integers(1, 12))
def test_parts_of_a_recording_explain_their_time(workload: Workload, steps: int) -> None:
    drive = RecordedDriver(workload, tokens=True, steps=steps)
    drive.run()
    asked = workload.arrivals[-1].attempt
    parts = [Recording.parse(lines) for lines in drive.recorded.parts]
    explained_parts = [Explanation(part, asked) for part in parts]
    ends = {one.attempt: one.ended for found in explained_parts for one in found.timelines.values() if one.ended}
    assert ends.keys() == {arrival.attempt for arrival in workload.arrivals}
    for part, found in zip(parts, explained_parts, strict=True):
        assert found.replay.difference is None
        assert {one.attempt for one in found.timelines.values() if one.came_before} == set(part.live)
        for one in found.timelines.values():
            assert sum(one.split().values()) == one.latency
            assert one.intervals[0].start >= found.began
            assert all(before.end == after.start for before, after in pairwise(one.intervals))


def test_an_output_prefix_that_is_computed_as_a_part_begins_is_prefill() -> None:
    come = (Arrival(1, 0, make_request(1, 9, 60), emitted=(30,)),)
    drive = RecordedDriver(Workload(come, make_layout(4), 40, SchedulerSettings(8, 1)), steps=2)
    drive.run()
    second = Explanation(Recording.parse(drive.recorded.parts[1]))
    assert phases(second, 1) == [(TimelinePhase.PREFILL, 1, 2, 16)]


def test_a_request_that_came_before_goes_on_in_its_phase() -> None:
    come = tuple(Arrival(number, 0, make_request(number, 9, 8)) for number in (1, 2, 3))
    drive = RecordedDriver(Workload(come, make_layout(4), 16, SchedulerSettings(8, 2)), steps=4)
    drive.run()
    found = Explanation(Recording.parse(drive.recorded.parts[1]))
    assert phases(found, 1)[0][0] is TimelinePhase.DECODE
    assert phases(found, 3)[0][0] is TimelinePhase.QUEUED
    assert found.timelines[1].output == 4
    assert [one.came_before for one in found.timelines.values()] == [True, True, True]
