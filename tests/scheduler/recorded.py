"""Records what a workload does to a scheduler, and reads the recording."""

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from scheduler.blueprint import Blueprint
from scheduler.recording import RecordedScheduler, Recorder, snapshot_line
from scheduler.replaying import Recording, Replay
from scheduler.settings import RecordSettings
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.play import play
from tests.scheduler.swapping import SwappingExecutor
from tests.scheduler.workloads import Workload
from tests.support.swaps import always_swap

KEY = bytes(range(32))


def blueprint_of(workload: Workload, slots: int = 0, holds: bool = False) -> Blueprint:
    """slots: of the host tier, for a page of each group."""
    host = slots * workload.layout.tables
    return Blueprint(
        workload.settings, workload.queue, workload.layout, workload.pages, workload.policy, host,
        workload.prefix_cache, holds,
    )  # fmt: skip


class RecordedDriver(SchedulerDriver):
    """Drives a workload whose scheduler is recorded.

    Attributes:
        lines: The recording, or its first part.
        recorded: All its parts.
        recorder: Its recorder.
    """

    def __init__(self, workload: Workload, tokens: bool = False, steps: int = 10**6, snapshots: bool = True) -> None:
        super().__init__(workload)
        blueprint, self.lines = blueprint_of(workload), list[str]()
        self.recorded = Lines(self.lines, snapshots)
        self.recorder = Recorder(blueprint, RecordSettings("file", steps, tokens), KEY, self.recorded)
        self.scheduler = RecordedScheduler(blueprint, self.scheduler.cache, workload.hasher, self.recorder)
        self.oracle.scheduler = self.scheduler


class Lines:
    """Parts of a recording, as lines.

    Attributes:
        current: Lines of the current part.
        before: Those of the parts before it, the oldest first.
        snapshots: Whether a part has its snapshot. Without, no second part can begin.
    """

    def __init__(self, current: list[str], snapshots: bool = True) -> None:
        self.current, self.before, self.snapshots = current, list[list[str]](), snapshots

    @property
    def parts(self) -> list[list[str]]:
        return [*self.before, self.current]

    def write(self, line: str) -> None:
        self.current.append(line + "\n")

    def begin_part(self, header: str) -> bool:
        if self.before and not self.snapshots:
            return False
        taken = [state_after(self.current)] if self.snapshots else []
        self.before.append(self.current)
        self.current = [header + "\n", *taken]
        return True


def state_after(lines: list[str]) -> str:
    """Returns a line with the state of the scheduler as a part of a recording ends."""
    replay = Replay(Recording.parse(lines))
    assert replay.run() is None
    return snapshot_line(replay.scheduler) + "\n"


def recorder_of(blueprint: Blueprint, lines: list[str], tokens: bool) -> Recorder:
    """Returns a recorder that adds to `lines`."""
    return Recorder(blueprint, RecordSettings("file", 10**6, tokens), KEY, Lines(lines))


def driven(workload: Workload, tokens: bool = False) -> list[str]:
    """Drives a workload under all laws, and returns the lines of its recording."""
    drive = RecordedDriver(workload, tokens)
    drive.run()
    assert "Error" not in drive.recorder.ended, drive.recorder.ended
    return drive.lines


def played(workload: Workload, tokens: bool = False, slots: int = 0, spoils: float = 0.0, jumps: int = 0) -> list[str]:
    """Plays a workload with a host tier, or with drafts, and returns the lines of its recording.

    Args:
        workload: The workload.
        tokens: Whether the recording keeps tokens.
        slots: Of the host tier, pages of each group.
        spoils: How likely a swapped page is spoilt.
        jumps: Most tokens that follow a draw.
    """
    blueprint, lines = blueprint_of(workload, slots), list[str]()
    recorder = recorder_of(blueprint, lines, tokens)
    scheduler = RecordedScheduler(blueprint, blueprint.cache(), workload.hasher, recorder)
    executor = SwappingExecutor(workload.layout, workload.pages, workload.settings, jumps=jumps)
    executor.spoils, executor.rng = spoils, Random(slots)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if slots:
            always_swap(monkeypatch)
        play(workload, scheduler, executor, patience=16)
    assert "Error" not in recorder.ended, recorder.ended
    return lines


def changed(lines: list[str], change: Callable[[dict], None]) -> Recording:
    """Returns the recording with a changed header."""
    header = json.loads(lines[0])
    change(header)
    return Recording.parse([json.dumps(header) + "\n", *lines[1:]])


def with_drafts(workload: Workload, drafts: int) -> Workload:
    return replace(workload, settings=replace(workload.settings, draft_tokens=drafts))
