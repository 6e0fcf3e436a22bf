"""Files of faults are read with errors by entry, and faults change the time of steps as they say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.simulated.executor import SimulatedExecutor
from model.simulated.faults import SLOW, SLOWEST, STALL, Fault, StepFaults, read_faults
from model.simulated.rows import SimulatedRows
from model.simulated.timeline import Timeline
from tests.model.simulated.engine import PROFILE, Clock
from tests.model.simulated.test_executor import plan_of
from tests.support.examples import examples
from tests.support.planted import plant

KILLED = {"at": 1, "kind": "kill", "engine": 0}
SLOWED = {"at": 2.5, "kind": "slow", "engine": 1, "seconds": 30, "factor": 3}
STALLED = {"at": 0, "kind": "stall", "engine": 1, "seconds": 9}


def written(directory: Path, entries: Any) -> Path:
    path = directory / "faults.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


def test_each_kind_is_read(tmp_path: Path) -> None:
    found = read_faults(written(tmp_path, [KILLED, SLOWED, STALLED]), 2, "--replicas")
    assert found == (Fault(1, "kill", 0), Fault(2.5, "slow", 1, 30, 3), Fault(0, "stall", 1, 9))
    assert read_faults(written(tmp_path, []), 1, "--replicas") == ()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (1, "is 1, must be an object with at, kind, engine"),
        ({"kind": "kill", "engine": 0}, "at is missing"),
        (KILLED | {"extra": 1}, "'extra' is 1, but a fault has no such field: at, kind, engine, seconds, factor"),
        (KILLED | {"kind": "drop"}, "kind is 'drop', must be one of kill, slow, stall"),
        (KILLED | {"kind": ["kill"]}, "kind is ['kill'], must be one of"),
        (KILLED | {"at": -1}, "at is -1, must be a number in [0, 1e+09]"),
        (KILLED | {"at": "1"}, "at is '1', must be a number"),
        (KILLED | {"at": float("nan")}, "at is nan, must be a number"),
        (KILLED | {"engine": True}, "engine is True, must be a number of an engine, from 0"),
        (KILLED | {"engine": -1}, "engine is -1, must be"),
        (KILLED | {"engine": 2}, "engine is 2, must be in [0, 2), as --max-replicas is 2"),
        (KILLED | {"seconds": 5}, "seconds is 5, but a fault of kind 'kill' has none"),
        (STALLED | {"factor": 5}, "factor is 5, but a fault of kind 'stall' has none"),
        (KILLED | {"kind": "stall"}, "seconds is missing: kind is 'stall'"),
        (STALLED | {"kind": "slow"}, "factor is missing: kind is 'slow'"),
        (SLOWED | {"seconds": -1}, "seconds is -1, must be a number in"),
        (SLOWED | {"factor": 0}, "factor is 0, must be a number in [0.001, 1e+06]"),
    ],
)
def test_an_error_names_file_entry_field_and_value(tmp_path: Path, entry: Any, said: str) -> None:
    path = written(tmp_path, [KILLED, entry])
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        read_faults(path, 2, "--max-replicas")
    assert str(caught.value).startswith(f"{path}: fault 1: {said}")


@pytest.mark.parametrize("text", ["[", "{}", "null", "\x00", "[" * 100_000])
def test_a_file_that_is_no_list_is_named(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        read_faults(path, 1, "--replicas")
    assert str(caught.value).startswith(f"{path}: ")


TIMES = st.integers(0, 12)
FAULTS = st.lists(
    st.builds(Fault, TIMES, st.sampled_from((SLOW, STALL)), st.just(0), TIMES, st.sampled_from((0.5, 2, 1e6))),
    max_size=6,
)


def check_lengths(faults: list[Fault], launches: list[int]) -> None:
    """Steps that take 3 seconds without faults, launched at these times, take what the faults say."""
    found = StepFaults(faults)
    lengths = [found.lengthened(3.0, at) for at in launches]
    for i, at in enumerate(launches):
        before = launches[i - 1] if i else -1
        factor = 1.0
        for fault in faults:
            if fault.kind == SLOW and at in range(int(fault.at), int(fault.at + fault.seconds)):
                factor *= fault.factor
        stalled = sum(fault.seconds for fault in faults if fault.kind == STALL and before < fault.at <= at)
        assert lengths[i] == 3 * min(factor, SLOWEST) + stalled


@settings(max_examples=examples(200), deadline=None)
@given(FAULTS, st.lists(TIMES, max_size=8).map(sorted))
def test_steps_are_longer_by_the_faults_of_their_launch(faults: list[Fault], launches: list[int]) -> None:
    check_lengths(faults, launches)


def that_stall_again(real: Any) -> Any:
    def lengthened(self: StepFaults, seconds: float, at: float) -> float:
        left = self._stalls.copy()
        found = real(self, seconds, at)
        self._stalls = left
        return found

    return lengthened


def test_a_stall_that_happens_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = [Fault(1, STALL, 0, 5)], [0, 1, 2]
    check_lengths(*case)
    plant(monkeypatch, StepFaults, "lengthened", that_stall_again)
    with pytest.raises(AssertionError):
        check_lengths(*case)


def test_an_executors_steps_take_the_time_of_its_faults() -> None:
    """Times are those of its own clock, the server's and not the profile's: a speed changes no time of a fault."""
    clock, costs, work = Clock(500.0), PROFILE.costs.faster(4.0), np.array([[0, 0, 50]], np.int32)
    faults = [Fault(2, SLOW, 0, 3, 10), Fault(7, STALL, 0, 40)]
    executor = SimulatedExecutor(SimulatedRows(4, 0.0), costs, Timeline(clock, faults))
    seconds, plain = [], costs.seconds(work)
    for step, now in enumerate((500.0, 502.0, 504.5, 505.0, 508.0, 560.0)):
        clock.now = now
        executor.launch(plan_of(step, work))
        seconds.append(executor.flying[-1][0] - now)
    assert seconds == pytest.approx([plain, 10 * plain, 10 * plain, plain, 40 + plain, plain])
