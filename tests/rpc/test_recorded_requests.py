"""Timelines of recorded requests for the dashboard, each made by a process of its own."""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from model.inputs.tokenizer import Tokenizer
from rpc.engines.recordings import part_before, read_part
from rpc.frontend.errors import RequestFailed
from rpc.link.coalesce import LOCAL_BITS
from rpc.web.recorded import KEPT, RecordedRequests
from rpc.web.recorded_process import explained
from scheduler.events import EndReason
from scheduler.recording import SNAPSHOT
from scheduler.spec import Spec
from tests.rpc.test_recordings import WORKLOAD, begun, run
from tests.scheduler.recorded import played
from tests.scheduler.workloads import Arrival, Workload, make_request
from tests.support.frontends import make_frontend, outputs


def workload_of(*attempts: int) -> Workload:
    come = tuple(Arrival(attempt, n, make_request(attempt, 5, 4)) for n, attempt in enumerate(attempts, 1))
    return replace(WORKLOAD, arrivals=come)


def write(path: Path, *attempts: int) -> Path:
    path.write_text("".join(played(workload_of(*attempts))))
    return path


def reason(file: Path, attempt: int, began: float = 0.0) -> str:
    with pytest.raises(RequestFailed) as failed:
        explained(file, began, attempt)
    return failed.value.reason


def test_a_timeline_is_that_of_quire_explain(tmp_path: Path) -> None:
    file = write(tmp_path / "engine.rec", 1, 2, 3)
    (same,) = json.loads(run("explain", str(file), "3", "--json").stdout)["requests"]
    found = explained(file, 0.0, 3)
    assert found == {"recording": "engine.rec", "differs_at_step": None, **same}
    assert sum(one["end_ns"] - one["start_ns"] for one in found["intervals"]) == found["latency_ns"]


def test_a_request_is_found_in_the_recording_of_its_engine(tmp_path: Path) -> None:
    file = write(tmp_path / "engine.rec", 1, 3)
    write(tmp_path / "engine.rec.1", 2, 4)
    for other in ("engine.rec.txt", "other.rec", "xengine.rec.2"):
        (tmp_path / other).write_text("no recording")
    (tmp_path / "engine.rec.2").touch()  # of an engine that starts
    assert [explained(file, 0.0, attempt)["recording"] for attempt in (1, 2, 3, 4)] == [
        "engine.rec", "engine.rec.1", "engine.rec", "engine.rec.1",
    ]  # fmt: skip
    assert reason(file, 5) == "NOT_RECORDED"


def test_a_request_of_two_parts_is_explained_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.rec"
    begun(path)
    first, last = read_part(part_before(path)), read_part(path)
    both = next(attempt for attempt in last.live if attempt not in first.live)
    found = explained(path, 0.0, both)
    assert found["recording"] == "engine.rec"
    assert not found["came_before"]
    with_snapshot = path.read_text()
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(SNAPSHOT)))
    assert explained(path, 0.0, both) == found, "also before FILE has its snapshot"
    whole = path.stat().st_size + part_before(path).stat().st_size
    monkeypatch.setattr("rpc.web.recorded_process.MOST_BYTES", whole - 1)
    assert reason(path, both) == "RECORDING_TOO_LARGE"
    path.write_text(with_snapshot)
    monkeypatch.setattr("rpc.web.recorded_process.MOST_BYTES", len(with_snapshot))
    assert explained(path, 0.0, both)["came_before"], "the two are too large together"
    part_before(path).unlink()
    assert explained(path, 0.0, both)["came_before"]


def test_recordings_of_another_run_are_passed_over(tmp_path: Path) -> None:
    """Its requests have the same numbers."""
    file = write(tmp_path / "engine.rec", 1, 2, 3)
    os.utime(file, (1000, 1000))
    write(tmp_path / "engine.rec.1", 1, 2)
    os.utime(tmp_path / "engine.rec.1", (2000, 2000))
    assert explained(file, 1500.0, 1)["recording"] == "engine.rec.1"
    assert reason(file, 3, 1500.0) == "NOT_RECORDED"


def test_requests_of_other_frontends_are_no_own_ones(tmp_path: Path) -> None:
    own, other = 1 << LOCAL_BITS, 2 << LOCAL_BITS
    file = write(tmp_path / "engine.rec", other | 1, own | 1, own | 3, other | 7)
    found = explained(file, 0.0, 3)
    assert found["request"] == 3
    behind = {name for interval in found["intervals"] for name in interval["behind_ns"]}
    assert behind <= {"1", str(other | 1), str(other | 7)}
    assert str(other | 1) in behind
    assert reason(file, 7) == "NOT_RECORDED"


def test_a_recording_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "engine.rec", 1, 2, 3)
    monkeypatch.setattr("rpc.web.recorded_process.MOST_BYTES", file.stat().st_size - 1)
    assert reason(file, 1) == "RECORDING_TOO_LARGE"


def test_a_request_behind_a_difference_has_no_timeline(tmp_path: Path) -> None:
    file = write(tmp_path / "engine.rec", 1, 2, 3)
    file.write_text(file.read_text().replace('"step":1,', '"step":1,"freed":[3],', 1))
    found = explained(file, 0.0, 1)
    assert (found["ended"], found["differs_at_step"]) == (None, 1)
    assert reason(file, 3) == "REPLAY_DIFFERS"


async def test_a_process_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    frontend, _, _ = make_frontend(tokenizer)
    recorded = RecordedRequests(frontend, tmp_path / "engine.rec")
    with pytest.raises(RequestFailed, match="is in no recording here"):
        await recorded.timeline(2)
    file = write(tmp_path / "engine.rec", 1, 2, 3)
    os.utime(file, (2**32, 2**32))  # a clock of files may lag
    answers = await asyncio.gather(*(recorded.timeline(attempt) for attempt in (1, 3)))
    assert [json.loads(answer) for answer in answers] == [explained(file, 0.0, attempt) for attempt in (1, 3)]


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Runs a shell command in place of the process."""
    program = directory / "python"
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


async def test_a_replay_that_takes_too_long_is_said(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedRequests(make_frontend(tokenizer)[0], tmp_path / "engine.rec")
    stand_in(tmp_path, monkeypatch, "kill -ALRM $$")
    with pytest.raises(RequestFailed) as failed:
        await recorded.timeline(1)
    assert (failed.value.code, failed.value.reason) == ("DEADLINE_EXCEEDED", "RECORDING_TOO_LONG")
    stand_in(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        await recorded.timeline(1)


async def test_a_client_that_leaves_leaves_no_process(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, said = RecordedRequests(make_frontend(tokenizer)[0], tmp_path / "engine.rec"), tmp_path / "pid"
    stand_in(tmp_path, monkeypatch, f"echo $$ > {said}.part; mv {said}.part {said}; exec sleep 1000")
    asking = [asyncio.create_task(recorded.timeline(attempt)) for attempt in (1, 2)]
    while not said.exists():
        await asyncio.sleep(0.01)
    first = int(said.read_text())
    said.unlink()
    asking[0].cancel()
    while not said.exists():  # the next one is explained as the first is over
        await asyncio.sleep(0.01)
    assert not psutil.pid_exists(first)
    asking[1].cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert not psutil.pid_exists(int(said.read_text()))


async def test_live_and_ended_requests_are_listed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    recorded = RecordedRequests(frontend, tmp_path / "engine.rec")
    for number in range(KEPT + 1):
        async with frontend.open(Spec("cat"), f"request {number}", None) as live:
            (attempt,) = engine.submitted()[-1:]
            engine.deliver(outputs([(attempt, 0, 70)], [(attempt, EndReason.LENGTH)], [attempt]))
            await live.wait()
    async with frontend.open(Spec("cat"), "open", None):
        listed = recorded.listed()
        assert [one["request_id"] for one in listed[:3]] == ["open", f"request {KEPT}", f"request {KEPT - 1}"]
        assert [one["outcome"] for one in listed[:2]] == [None, "length"]
        assert [one["attempt"] for one in listed[:2]] == [KEPT + 2, KEPT + 1]
        assert len(listed) == KEPT + 1
        assert "cat" not in json.dumps(listed)
