"""The last steps of a recording are a recording of their own."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.excerpt import last_steps
from scheduler.replaying import Recording, RecordingError, Replay
from tests.scheduler.recorded import RecordedDriver, driven, played, with_drafts
from tests.scheduler.test_recording import conversation
from tests.scheduler.workloads import Workload, workloads
from tests.support.examples import examples
from tests.support.swaps import always_swap

few = settings(max_examples=examples(60), deadline=None)


def check(recording: Recording, steps: int) -> Recording:
    """Returns the last steps, which replay to the same end as the whole."""
    whole = Replay(recording)
    assert whole.run() is None
    found = Recording.parse(last_steps(recording, steps))
    replay = Replay(found)
    assert replay.run() is None
    assert replay.steps == min(steps, whole.steps)
    assert replay.scheduler.stats() == whole.scheduler.stats()
    assert (found.tokens, found.ended) == (recording.tokens, recording.ended)
    return found


@few
@given(workloads(several=True, cancels=True, resumed=True, faults=True), st.integers(1, 30), st.booleans())
def test_an_excerpt_goes_on_to_the_same_end(workload: Workload, steps: int, tokens: bool) -> None:
    check(Recording.parse(driven(workload, tokens)), steps)


@few
@given(workloads(several=True, cancels=True), st.integers(1, 12), st.integers(1, 30))
def test_so_does_one_of_a_later_part_and_one_of_an_excerpt(workload: Workload, length: int, steps: int) -> None:
    drive = RecordedDriver(workload, steps=length)
    drive.run()
    last = Recording.parse(drive.recorded.parts[-1])
    check(check(last, steps), max(1, steps - 1))


def test_a_whole_recording_needs_no_snapshot() -> None:
    recording = Recording.parse(driven(conversation()))
    found = check(recording, 10**6)
    assert (found.part, found.snapshot) == (0, None)
    assert found.lines == [line for line in recording.lines if line]
    assert check(recording, 3).snapshot is not None


def test_why_a_recording_ended_is_kept() -> None:
    lines = [*driven(conversation()), json.dumps({"ended": "a beam search"}) + "\n"]
    assert check(Recording.parse(lines), 3).ended == "a beam search"


def test_a_difference_before_the_excerpt_is_an_error() -> None:
    lines = driven(conversation())
    (place, *_) = (i for i, line in enumerate(lines) if '"grown"' in line)
    lines[place] = re.sub(r'"grown":[^"]*', '"grown":[[0,0,0,49]],', lines[place])
    recording = Recording.parse(lines)
    assert Replay(recording).run() is not None
    with pytest.raises(RecordingError, match="its replay differs at step 0 already: ask for more steps"):
        list(last_steps(recording, 2))
    found = Recording.parse(last_steps(recording, 10**6))
    assert Replay(found).run() is not None, "the difference is what such a recording is kept for"


@pytest.mark.parametrize("line", ["garbage\n", "[1, 2]\n", "7\n", "[" * 10_000 + "\n"])
def test_a_line_that_is_no_call_is_an_error(line: str) -> None:
    lines = driven(conversation())
    recording = Recording.parse([*lines[:-3], line, *lines[-3:]])
    with pytest.raises(RecordingError, match=r"line \d+ is no JSON object"):
        list(last_steps(recording, 2))


@few
@given(workloads(resumed=True), st.integers(1, 30), st.integers(1, 40))
def test_an_excerpt_may_have_a_host_tier(workload: Workload, steps: int, slots: int) -> None:
    lines = played(workload, slots=slots)
    with pytest.MonkeyPatch.context() as monkeypatch:
        always_swap(monkeypatch)
        check(Recording.parse(lines), steps)


@few
@given(workloads(cancels=True), st.integers(1, 30), st.integers(1, 5))
def test_so_may_one_with_drafts(workload: Workload, steps: int, drafts: int) -> None:
    check(Recording.parse(played(with_drafts(workload, drafts), tokens=True)), steps)
