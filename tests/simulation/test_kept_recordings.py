"""Each recording in `recordings` is a case of production that is kept as a test."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cache_manager.manager import CacheManager
from rpc.engines.recordings import read_recording
from rpc.simulation.engine import SimulatedEngine
from scheduler.excerpt import last_steps
from scheduler.replaying import Recording
from scheduler.running_work import RunningWork
from tests.scheduler.driver import BROKEN
from tests.scheduler.executor import LawBroken
from tests.scheduler.recorded import RecordedDriver, driven
from tests.scheduler.test_recording import conversation
from tests.simulation.kept import check_calls, check_simulated
from tests.simulation.test_seeds import keeps_a_page, nobody_leaves
from tests.support.planted import plant

FOLDER = Path(__file__).parent / "recordings"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.rec")), ids=lambda path: path.stem)
def test_the_laws_hold_in_what_was_recorded(path: Path) -> None:
    """The checks raise where they do not."""
    check_simulated(check_calls(read_recording(path)))


def test_the_kept_storm_has_what_it_is_kept_for() -> None:
    """Pages are short, clients leave, and one request has a grammar."""
    recording = check_calls(read_recording(FOLDER / "storm.rec"))
    ledger = check_simulated(recording)
    assert len(ledger.reasons) == 16


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
    mended = check_calls(recording)
    assert len(mended.lines) == len([line for line in recording.lines if line]) - 1
    assert len(check_simulated(mended).reasons) == 3


def test_an_exception_that_was_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.parse(driven(conversation()))
    plant(monkeypatch, RunningWork, "make_room", raises_with_two_rows)
    with pytest.raises(LawBroken, match=r"the scheduler raises: .*Overflow"):
        check_calls(recording)


def test_pages_that_nobody_has_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = read_recording(FOLDER / "storm.rec")
    plant(monkeypatch, CacheManager, "release", keeps_a_page)
    with pytest.raises(BROKEN):
        check_simulated(check_calls(recording))


def test_clients_that_cannot_leave_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = read_recording(FOLDER / "storm.rec")
    plant(monkeypatch, SimulatedEngine, "put", nobody_leaves)
    with pytest.raises(LawBroken, match="is not ended in time"):
        check_simulated(recording)


def test_a_recording_of_which_nothing_is_left_is_no_test() -> None:
    recording = read_recording(FOLDER / "storm.rec")
    with pytest.raises(LawBroken, match="decides otherwise before the first request"):
        check_simulated(replace(recording, lines=[]))
