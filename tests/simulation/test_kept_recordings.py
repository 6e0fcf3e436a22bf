"""Each recording in `recordings` is a case of production that is kept as a test."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.manager import CacheManager
from rpc.engines.recordings import read_recording
from rpc.simulation.engine import SimulatedEngine
from rpc.simulation.recorded import Trace
from scheduler.events import EndReason, Submit
from scheduler.excerpt import last_steps
from scheduler.parameters import Beam
from scheduler.recording import RecordedScheduler
from scheduler.replaying import Recording, Replay
from scheduler.running_work import RunningWork
from tests.scheduler.driver import BROKEN
from tests.scheduler.executor import LawBroken
from tests.scheduler.recorded import RecordedDriver, blueprint_of, driven, recorder_of
from tests.scheduler.test_recording import conversation
from tests.scheduler.workloads import Workload, make_request, workloads
from tests.simulation.kept import check_calls, check_kept, check_simulated
from tests.simulation.test_seeds import keeps_a_page, nobody_leaves
from tests.support.examples import examples
from tests.support.planted import plant

FOLDER = Path(__file__).parent / "recordings"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.rec")), ids=lambda path: path.stem)
def test_the_laws_hold_in_what_was_recorded(path: Path) -> None:
    """The checks raise where they do not."""
    check_kept(read_recording(path))


def storm() -> Recording:
    """Returns 16 requests on few pages. Three clients leave, and one request has a grammar."""
    return read_recording(FOLDER / "storm.rec")


def test_the_kept_storm_has_what_it_is_kept_for() -> None:
    recording = storm()
    replay = Replay(recording)
    replay.run()
    assert replay.scheduler.stats().preemptions == 5
    assert any('"ready"' in line for line in recording.lines)
    ledger = check_kept(recording)
    assert ledger is not None
    assert Counter(ledger.reasons.values()) == {EndReason.LENGTH: 13, EndReason.FINISHED: 3}


@pytest.mark.parametrize(("steps", "come"), [(5, 0), (205, 1), (213, 15)])
def test_excerpts_are_checked_like_whole_recordings(steps: int, come: int) -> None:
    excerpt = Recording.parse(last_steps(storm(), steps))
    assert excerpt.snapshot is not None
    ledger = check_kept(excerpt)
    assert ledger is not None
    assert len(ledger.reasons) == come


@settings(max_examples=examples(20), deadline=None)
@given(workloads(several=True, cancels=True, resumed=True, faults=True), st.booleans())
def test_sound_recordings_pass(workload: Workload, tokens: bool) -> None:
    check_kept(Recording.parse(driven(workload, tokens)))


class Overflow(Exception):
    """A fault of a scheduler."""


def raises_with_two_rows(real: Callable) -> Callable:
    def make_room(self, now):
        if self._rows.used == 2:
            raise Overflow
        return real(self, now)

    return make_room


def failed(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Records a scheduler with a fault until it raises an exception, and returns its last steps."""
    drive = RecordedDriver(conversation())
    with monkeypatch.context() as faulty:
        plant(faulty, RunningWork, "make_room", raises_with_two_rows)
        with pytest.raises(Overflow):
            drive.run()
    assert '"raised":"Overflow"' in drive.lines[-1]
    return Recording.parse(drive.lines)


def test_an_exception_of_the_scheduler_is_found_until_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = failed(monkeypatch)
    with monkeypatch.context() as faulty:
        plant(faulty, RunningWork, "make_room", raises_with_two_rows)
        for steps in (3, 10**6):
            with pytest.raises(LawBroken, match="still raises Overflow"):
                check_calls(Recording.parse(last_steps(recording, steps)))
    assert len(check_calls(recording).lines) == len([line for line in recording.lines if line]) - 1
    served = check_kept(recording)
    assert served is not None
    assert len(served.reasons) == len(recording.attempts)


def with_another_plan(recording: Recording, place: int) -> Recording:
    """Returns a recording of which today's scheduler makes another plan."""
    lines = [line for line in recording.lines if line]
    place = next(i for i in range(place, len(lines)) if '"plan"' in lines[i])
    call = json.loads(lines[place])
    call["plan"]["leaves"] = [99]
    return replace(recording, lines=[*lines[:place], json.dumps(call) + "\n", *lines[place + 1 :]])


def test_an_exception_that_may_be_mended_or_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LawBroken, match=r"step \d+ is another one today, before the call that raised"):
        check_kept(with_another_plan(failed(monkeypatch), 10))


def test_a_recording_that_has_too_little_left_is_told() -> None:
    with pytest.raises(LawBroken, match="calls come after a plan that is another today"):
        check_kept(with_another_plan(storm(), 0))
    assert check_kept(with_another_plan(storm(), 60)) is not None
    last = Recording.parse(last_steps(storm(), 5))
    assert not any('"submit"' in line for line in last.lines)
    with pytest.raises(LawBroken, match="11 of 11 calls come after a plan that is another today"):
        check_kept(with_another_plan(last, 0))


def test_an_exception_that_was_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.parse(driven(conversation()))
    plant(monkeypatch, RunningWork, "make_room", raises_with_two_rows)
    with pytest.raises(LawBroken, match=r"the scheduler raises: .*Overflow"):
        check_calls(recording)


def test_pages_that_nobody_has_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace.of(storm())
    plant(monkeypatch, CacheManager, "release", keeps_a_page)
    with pytest.raises(BROKEN):
        check_simulated(trace)


def test_clients_that_cannot_leave_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace.of(storm())
    plant(monkeypatch, SimulatedEngine, "put", nobody_leaves)
    with pytest.raises(LawBroken, match="is not ended in time"):
        check_simulated(trace)


def test_a_request_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace.of(storm())
    plant(monkeypatch, SimulatedEngine, "_get_ready", lambda _: lambda self, now: None)
    with pytest.raises(LawBroken, match="engines go on and on, and requests are open"):
        check_simulated(trace)


def test_searches_are_replayed() -> None:
    request = replace(make_request(1, 5, 4), beam=Beam(2))
    lines: list[str] = []
    blueprint = blueprint_of(conversation())
    scheduler = RecordedScheduler(
        blueprint, blueprint.cache(), conversation().hasher, recorder_of(blueprint, lines, True)
    )
    scheduler.schedule(0.0, [Submit(1, request)])
    assert check_kept(Recording.parse(lines)) is None
