"""A scheduler that was restored from a snapshot decides as the one that it was taken of."""

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.blueprint import Blueprint
from scheduler.recording import SNAPSHOT
from scheduler.replaying import Recording, RecordingError, Replay
from scheduler.scheduler import Scheduler
from scheduler.settings import SCHEDULING_POLICIES
from scheduler.snapshot import Entry, SnapshotError, restored, snapshot
from tests.scheduler.recorded import RecordedDriver, blueprint_of, driven, played, with_drafts
from tests.scheduler.test_recording import conversation, of_a_tenant
from tests.scheduler.workloads import Workload, workloads
from tests.support.examples import examples
from tests.support.swaps import always_swap

few = settings(max_examples=examples(60), deadline=None)


class RestoredReplay(Replay):
    """A replay whose scheduler can be put in place by one that is restored from its own snapshot."""

    def restore(self, blueprint: Blueprint) -> None:
        entries = json.loads(json.dumps(snapshot(self.scheduler)))
        fresh = blueprint.scheduler(blueprint.cache(), self._hasher)
        self.scheduler = restored(entries, fresh, self._hasher)


def check_restores(lines: list[str], rng: Random) -> None:
    """Replays a recording, with the scheduler restored between some of the calls."""
    recording = Recording.parse(lines)
    replay = RestoredReplay(recording)
    for _ in replay:
        if rng.random() < 0.2:
            replay.restore(recording.blueprint)
    assert replay.difference is None


@few
@given(workloads(cancels=True, queue_timeout=True, faults=True, resets=True), st.randoms())
def test_a_restored_scheduler_goes_on_alike(workload: Workload, rng: Random) -> None:
    check_restores(driven(workload), rng)


@few
@given(
    workloads(several=True, cancels=True, resumed=True, alike=True),
    st.sampled_from(SCHEDULING_POLICIES),
    st.sampled_from([None, 0.5]),
    st.integers(0, 4),
    st.booleans(),
    st.randoms(),
)
def test_so_does_one_under_each_policy(
    workload: Workload, policy: str, target: float | None, jumps: int, tokens: bool, rng: Random
) -> None:
    come = tuple(map(of_a_tenant, workload.arrivals))
    chosen = replace(workload.settings, policy=policy, target_itl=target, tenant_weights="acme=3,default=0.5")
    check_restores(played(replace(workload, arrivals=come, settings=chosen), tokens, jumps=jumps), rng)


@few
@given(workloads(resumed=True), st.integers(1, 40), st.sampled_from([0.0, 0.5]), st.randoms())
def test_so_does_one_with_a_host_tier(workload: Workload, slots: int, spoils: float, rng: Random) -> None:
    lines = played(workload, slots=slots, spoils=spoils)
    with pytest.MonkeyPatch.context() as monkeypatch:
        always_swap(monkeypatch)
        check_restores(lines, rng)


@few
@given(workloads(cancels=True), st.integers(1, 5), st.randoms())
def test_so_does_one_with_drafts(workload: Workload, drafts: int, rng: Random) -> None:
    check_restores(played(with_drafts(workload, drafts), tokens=True), rng)


@few
@given(workloads(several=True, cancels=True, resumed=True, alike=True), st.integers(1, 12), st.booleans())
def test_each_part_of_a_recording_replays(workload: Workload, steps: int, tokens: bool) -> None:
    drive = RecordedDriver(workload, tokens, steps)
    drive.run()
    parts = [Recording.parse(lines) for lines in drive.recorded.parts]
    assert [part.part for part in parts] == [*range(len(parts))]
    replays = list(map(Replay, parts))
    assert [replay.run() for replay in replays] == [None] * len(parts)
    for one, following, alone in zip(parts, parts[1:], replays[1:], strict=False):
        assert set(following.live) <= {arrival.attempt for arrival in workload.arrivals}
        both = Replay(one.joined(following))
        assert both.run() is None
        assert both.scheduler.stats() == alone.scheduler.stats()


def state(steps: int = 6) -> tuple[Blueprint, Scheduler]:
    """Returns a blueprint, and a scheduler of it at work."""
    replay = Replay(Recording.parse(driven(conversation())))
    calls = iter(replay)
    for _ in range(steps):
        next(calls)
    return blueprint_of(conversation()), replay.scheduler


def restored_from(change: Callable[[list[Entry]], Any]) -> Scheduler:
    blueprint, scheduler = state()
    entries = json.loads(json.dumps(snapshot(scheduler)))
    change(entries)
    hasher = conversation().hasher
    return restored(entries, blueprint.scheduler(blueprint.cache(), hasher), hasher)


def entry(entries: list[Entry], kind: str) -> Entry:
    return next(one for one in entries if one[0] == kind)


def of_class(entries: list[Entry], name: str) -> Entry:
    return next(one for one in entries if one[0] == "object" and one[1].endswith(f":{name}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: of_class(entries, "Rows").__setitem__(1, "os:DirEntry"), "an object of 'os:DirEntry'"),
        (lambda entries: of_class(entries, "Rows").__setitem__(1, "scheduler.none:Rows"), "is none of this version"),
        (lambda entries: of_class(entries, "Rows").__setitem__(1, "scheduler.rows:np"), "an object of 'scheduler.row"),
        (lambda entries: of_class(entries, "Rows").extend(["colour", 1]), "a Rows has other attributes here"),
        (lambda entries: of_class(entries, "Sequence").extend(["colour", 1]), "a Sequence has other attributes here"),
        (lambda entries: of_class(entries, "Queue").__delitem__(slice(2, 4)), "a Queue has other attributes here"),
        (lambda entries: entry(entries, "array").__setitem__(1, "|O"), "an array of the snapshot is of '|O'"),
        (lambda entries: entry(entries, "array").__setitem__(2, [10**12]), "the arrays of the snapshot are too large"),
        (lambda entries: entry(entries, "array").__setitem__(2, [-1]), "the arrays of the snapshot are too large"),
        (lambda entries: entry(entries, "array").__setitem__(2, [1]), "another size than it says"),
        (lambda entries: entry(entries, "array").__setitem__(3, [0]), "another size than it says"),
        (lambda entries: entry(entries, "view").__setitem__(6, 10**9), "is none of this version"),
        (lambda entries: entry(entries, "view").__setitem__(5, [10**6]), "is none of this version"),
        (lambda entries: entry(entries, "view").__setitem__(slice(2, 4), [[9999], [0]]), "larger than its array"),
        (lambda entries: entry(entries, "deque").__setitem__(1, 10**30), "is none of this version"),
        (lambda entries: entry(entries, "list").__setitem__(0, "frame"), "an entry of the snapshot is 'frame'"),
        (lambda entries: entries.__setitem__(0, ["list"]), "has no scheduler"),
        (lambda entries: entries.clear(), "is none of this version"),
    ],
)  # fmt: skip
def test_another_snapshot_is_refused(change: Callable[[list[Entry]], Any], message: str) -> None:
    with pytest.raises(SnapshotError, match=message.replace("|", "[|]")):
        restored_from(change)


def test_tuples_in_a_circle_are_refused() -> None:
    def change(entries: list[Entry]) -> None:
        place = len(entries)
        entries.append(["tuple", [place]])

    with pytest.raises(SnapshotError, match="RecursionError"):
        restored_from(change)


def test_tuples_that_take_for_ever_to_hash_are_refused() -> None:
    """Each has the next one twice: a hash of the first goes through 2**60."""

    def change(entries: list[Entry]) -> None:
        first = len(entries)
        entries.extend(["tuple", [first + n + 1], [first + n + 1]] for n in range(60))
        entries += [["tuple"], ["set", [first]]]

    with pytest.raises(SnapshotError, match="a tuple of too many members"):
        restored_from(change)


def test_objects_of_other_packages_are_in_no_snapshot() -> None:
    _, scheduler = state()
    scheduler.settings = Random()  # type: ignore[assignment]
    with pytest.raises(SnapshotError, match=r"an object is a random\.Random"):
        snapshot(scheduler)


def later_part() -> tuple[list[str], int]:
    """Returns the lines of the second part of a recording, and the number of the one with its snapshot."""
    drive = RecordedDriver(conversation(), steps=5)
    drive.run()
    lines = drive.recorded.parts[1]
    return lines, next(number for number, line in enumerate(lines) if line.startswith(SNAPSHOT))


def with_snapshot(change: Callable[[dict[str, Any]], Any]) -> Recording:
    """Returns the second part of a recording, with a changed snapshot."""
    lines, number = later_part()
    taken = json.loads(lines[number])
    change(taken)
    lines[number] = json.dumps(taken, separators=(",", ":")) + "\n"
    return Recording.parse(lines)


def test_a_wrong_number_in_a_snapshot_is_a_difference() -> None:
    """A planted fault."""

    def change(taken: dict[str, Any]) -> None:
        scheduler = of_class(taken["snapshot"], "Scheduler")
        scheduler[scheduler.index("_steps") + 1] += 1

    assert Replay(with_snapshot(change)).run() is not None


def test_attributes_of_other_kinds_are_refused() -> None:
    def change(taken: dict[str, Any]) -> None:
        scheduler = of_class(taken["snapshot"], "Scheduler")
        scheduler[scheduler.index("queue") + 1] = None

    with pytest.raises(RecordingError, match="its snapshot has no scheduler at work"):
        Replay(with_snapshot(change))


def test_a_snapshot_of_other_fields_is_refused() -> None:
    lines, number = later_part()
    lines[number] = SNAPSHOT + '7,"snapshot":[]}\n'
    with pytest.raises(RecordingError, match="the first line or the snapshot is none of Quire"):
        Recording.parse(lines)


def test_a_snapshot_may_come_behind_the_end() -> None:
    """A replay goes on where the recorder has ended meanwhile."""
    lines, number = later_part()
    found = Recording.parse([*lines[:number], *lines[number + 1 :], '{"ended":"a reason"}\n', lines[number]])
    assert found.ended == "a reason"
    assert Replay(found).run() is None


@pytest.mark.parametrize("glued", ["", '{"schedule":1.0}'])
def test_what_is_behind_a_broken_snapshot_is_left_out(glued: str) -> None:
    """As on a full disk; a line of the engine's may be behind it, without a line break between them."""
    lines, number = later_part()
    first = Recording.parse(lines[:number])
    lines[number] = lines[number][:100] + glued + "\n"
    found = Recording.parse(lines)
    assert found.ended == "a line is broken, as on a disk that was full"
    assert found.lines == first.lines
    assert not found.replays


def test_a_call_that_was_cut_off_before_the_snapshot_is_left_out() -> None:
    """The recorder ends where the disk is full; the snapshot comes when there is room again."""
    lines, number = later_part()
    taken = lines.pop(number)
    found = Recording.parse([*lines[:-1], lines[-1][:9] + taken])
    assert found.ended == "a line is broken, as on a disk that was full"
    assert found.lines == lines[1:-1]
    assert Replay(found).run() is None
