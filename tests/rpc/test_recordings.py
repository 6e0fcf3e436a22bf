"""Files of recordings, and the commands that read them."""

import errno
import html
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

from rpc.cli.explain_page import draw_request
from rpc.cli.main import app
from rpc.engines import recordings
from rpc.engines.assembly import assemble
from rpc.engines.explained import request_numbers
from rpc.engines.recordings import (
    RecordingFiles,
    open_recording,
    part_before,
    read_part,
    read_recording,
    start_recorder,
    write_recording,
)
from rpc.link.coalesce import LOCAL_BITS
from rpc.settings import EngineConfig
from scheduler.explaining import Explanation, TimelineInterval, TimelinePhase
from scheduler.recording import SNAPSHOT, RecordedScheduler, Recorder, RecordingEnd
from scheduler.replaying import Recording, RecordingError
from scheduler.settings import RecordSettings, SchedulerSettings
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.play import play
from tests.scheduler.recorded import KEY, blueprint_of, driven, played
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.planted import plant
from tests.support.processes import tree, wait_until

WORKLOAD = Workload(
    tuple(Arrival(n, n, make_request(n, 5, 4)) for n in range(1, 4)), make_layout(4), 8, SchedulerSettings(8, 2)
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "engine.rec"
    path.write_text("".join(played(WORKLOAD)))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_a_file_is_its_owners_and_no_other_is_written_over(tmp_path: Path) -> None:
    blueprint, settings = blueprint_of(WORKLOAD), RecordSettings(str(tmp_path / "engine.rec"))
    for name in ("engine.rec", "engine.rec.1", "engine.rec.2"):
        assert start_recorder(blueprint, settings) is not None
        file = tmp_path / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert read_recording(file).blueprint == blueprint
    assert start_recorder(blueprint, RecordSettings()) is None


def test_a_place_where_no_file_can_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        open_recording(tmp_path / "nowhere" / "engine.rec")


SNAPSHOT_SECONDS = 120.0  # that a snapshot is waited for: its process gives way to all others


class WaitingFiles(RecordingFiles):
    """Files whose next part begins as soon as the snapshot is there, however long that takes."""

    def begin_part(self, header: str) -> bool:
        wait_until(lambda: super(WaitingFiles, self).begin_part(header), "a snapshot", SNAPSHOT_SECONDS)
        return True


def begun(path: Path, steps: int = 4) -> Recorder:
    """Records a workload in files of parts of so many steps, until the last one has its snapshot."""

    work = replace(WORKLOAD, arrivals=tuple(Arrival(n, 2 * n, make_request(n, 5, 4)) for n in range(1, 9)))
    files, blueprint = WaitingFiles(path), blueprint_of(work)
    recorder = Recorder(blueprint, RecordSettings(str(path), steps), KEY, files)
    scheduler = RecordedScheduler(blueprint, blueprint.cache(), work.hasher, recorder)
    with closing(files):
        play(work, scheduler, FakeExecutor(work.layout, work.pages, work.settings))
        wait_until(lambda: read_part(path).snapshot is not None, "the last snapshot", SNAPSHOT_SECONDS)
    return recorder


def test_a_recording_goes_on_in_a_new_file_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    assert begun(path).ended == ""
    assert sorted(one.name for one in tmp_path.iterdir()) == ["engine.rec", "engine.rec.previous"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    last, before = read_part(path), read_part(part_before(path))
    assert last.part == before.part + 1 > 1
    assert last.live
    for part in (path, part_before(path)):
        assert run("replay", str(part)).stdout.startswith("the same plans: ")
        assert run("explain", str(part)).exit_code == 0
        assert run("replay", str(part), "--pages", "+50%").exit_code == 0
    asked = str(last.live[0])
    (one,) = json.loads(run("explain", str(path), asked, "--json").stdout)["requests"]
    assert one["came_before"]
    assert "from the beginning of the recording on" in run("explain", str(path), asked).stdout
    assert f"older ones are in {part_before(path)}" in run("explain", str(path), "99").stderr
    _, *rows = run("explain", str(path)).stdout.splitlines()
    assert {row.split()[0] for row in rows if row.split()[1] == "before"} == set(map(str, last.live))


def test_a_part_without_its_snapshot_replays_behind_the_part_before(tmp_path: Path) -> None:
    """As after an engine that died soon after a part began."""
    path = tmp_path / "engine.rec"
    begun(path)
    lines = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith(SNAPSHOT)]
    path.write_text("".join(lines))
    assert read_recording(path).part == read_part(path).part - 1
    assert run("replay", str(path)).stdout.startswith("the same plans: ")
    part_before(path).unlink()
    done = run("replay", str(path))
    assert done.exit_code == 1
    assert "of a recording and has no snapshot of what it began with" in done.stderr
    assert "the part before it is beside it, as FILE.previous" in done.stderr


def test_a_part_that_does_not_replay_ends_the_recording_by_its_reason(tmp_path: Path) -> None:
    header, *lines = played(WORKLOAD)
    with closing(WaitingFiles(tmp_path / "engine.rec")) as files:
        for line in (header, *lines):
            files.write(line.rstrip("\n").replace('"step":4,', '"step":4,"freed":[3],'))
        assert files.begin_part(header.rstrip("\n"))
        with pytest.raises(RecordingEnd, match=r"engine\.rec\.previous differs at step 4; please report this"):
            files.begin_part(header)


def killed(argument: str) -> bool:
    """Kills a process below this one by its last argument. Returns whether there was one."""
    for child in tree(os.getpid()):
        with suppress(psutil.Error):  # other tests' processes end meanwhile
            if child.cmdline()[-1:] == [argument]:
                child.kill()
                return True
    return False


def test_a_replay_that_is_killed_ends_the_recording_by_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nexec sleep 98765\n")
    endless.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(endless))
    with closing(RecordingFiles(tmp_path / "engine.rec")) as files:
        assert files.begin_part("a header")
        assert not files.begin_part("a header"), "its replay runs"
        wait_until(lambda: killed("98765"), "the replay's process")
        with pytest.raises(RecordingEnd, match="its replay was ended by signal 9, as where memory is short"):
            wait_until(lambda: files.begin_part("a header"), "the end of the replay")


def test_a_file_that_is_gone_or_anothers_ends_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    with closing(RecordingFiles(path)) as files:
        path.rename(tmp_path / "saved")
        with pytest.raises(RecordingEnd, match="was removed or renamed"):
            files.begin_part("a header")
        with closing(RecordingFiles(path)) as others:
            with pytest.raises(RecordingEnd, match="was removed or renamed"):
                files.begin_part("a header")
            others.write("a line")
        files.write("another")
    assert path.read_text() == "a line\n"
    assert (tmp_path / "saved").read_text() == "another\n"


def test_a_part_that_cannot_begin_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, blueprint = tmp_path / "engine.rec", blueprint_of(WORKLOAD)
    with closing(RecordingFiles(path)) as files:
        recorder = Recorder(blueprint, RecordSettings(str(path), 2), KEY, files)
        plant(monkeypatch, recordings, "_new_file", lambda right: no_more_files)
        scheduler = RecordedScheduler(blueprint, blueprint.cache(), WORKLOAD.hasher, recorder)
        play(WORKLOAD, scheduler, FakeExecutor(WORKLOAD.layout, WORKLOAD.pages, WORKLOAD.settings))
        assert recorder.ended == "no further part can begin: [Errno 24] Too many open files"
    assert read_part(part_before(path)).ended == recorder.ended, "the last line, in the file that is there"


def no_more_files(path: Path) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_the_part_before_another_recording_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    part_before(path).touch()
    assert RecordingFiles(path).path == tmp_path / "engine.rec.1"


def test_drafts_are_refused_where_tokens_are_left_out() -> None:
    settings = EngineConfig(scheduler=SchedulerSettings(draft_tokens=2), record=RecordSettings("file"))
    with pytest.raises(ValueError, match="--record with --speculative-tokens needs --record-tokens"):
        assemble(settings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "--record-steps is 0, must be at least 1"),
        ({"tokens": True}, "--record-tokens does nothing without --record"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecordSettings(**values)  # type: ignore[arg-type]


def test_replay_says_what_it_ran(recorded: Path) -> None:
    done = run("replay", str(recorded))
    assert done.exit_code == 0
    assert done.stdout == "the same plans: 8 steps, 3 requests, 8.0 s\n"
    assert json.loads(run("replay", str(recorded), "--json").stdout) == {
        "steps": 8, "requests": 3, "seconds": 8.0, "ended": None, "raised": None, "difference": None,
    }  # fmt: skip


def test_replay_shows_the_first_difference(recorded: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    number = [i for i, line in enumerate(lines) if '"plan"' in line][2]
    call = json.loads(lines[number])
    call["plan"]["leaves"] = "99:0123abcd"
    recorded.write_text("".join([*lines[:number], json.dumps(call) + "\n", *lines[number + 1 :]]))
    done = run("replay", str(recorded))
    assert done.exit_code == 1
    assert done.stdout == "step 2 differs in leaves\n  recorded: 99 rows, checksum 0123abcd\n  replayed: none\n"
    done = run("replay", str(recorded), "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["difference"] == {
        "step": 2, "array": "leaves", "recorded": "99:0123abcd", "replayed": None,
    }  # fmt: skip


def test_an_excerpt_is_written_and_replayed(recorded: Path) -> None:
    path = recorded.with_name("excerpt.rec")
    done = run("replay", str(recorded), "--excerpt", str(path), "--excerpt-steps", "3")
    assert done.exit_code == 0
    assert done.stdout.startswith("the same plans: 3 steps, ")
    assert done.stderr == f"{path}: {path.stat().st_size:,} bytes\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert run("replay", str(path)).stdout == done.stdout
    assert run("explain", str(path)).exit_code == 0
    again = run("replay", str(recorded), "--excerpt", str(path))
    assert (again.exit_code, again.stderr) == (1, f"quire: [Errno 17] File exists: '{path}'\n")
    other = run("replay", str(recorded), "--excerpt", str(recorded.with_name("other.rec")), "--pages", "+50%")
    assert (other.exit_code, other.stderr) == (
        1, "quire: --excerpt writes what was recorded: it takes no changed settings\n",
    )  # fmt: skip
    assert not recorded.with_name("other.rec").exists()
    alone = run("replay", str(recorded), "--excerpt-steps", "3")
    assert alone.stderr == "quire: --excerpt-steps is the length of an excerpt: it needs --excerpt\n"


def test_what_cannot_be_written_whole_leaves_no_file(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield "a header\n"
        raise OSError(errno.ENOSPC, "the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_recording(tmp_path / "excerpt.rec", lines())
    assert not list(tmp_path.iterdir())


def test_an_early_end_is_told(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    path.write_text("".join(played(WORKLOAD)) + '{"ended":"a reason"}\n')
    assert run("replay", str(path)).stdout.endswith("the recording ended early: a reason\n")


def test_explain_lists_all_requests_slowest_first(recorded: Path) -> None:
    done = run("explain", str(recorded))
    assert done.exit_code == 0
    heading, *rows = done.stdout.splitlines()
    assert heading.split()[:6] == ["request", "at", "prompt", "output", "end", "seconds"]
    assert [row.split()[:5] for row in rows] == [
        ["3", "3.000", "5", "4", "length"], ["1", "1.000", "5", "4", "length"], ["2", "2.000", "5", "4", "length"],
    ]  # fmt: skip
    assert [row.split()[5] for row in rows] == ["5.000", "3.000", "3.000"]


def test_explain_splits_the_time_of_one(recorded: Path) -> None:
    done = run("explain", str(recorded), "3")
    assert done.exit_code == 0
    first, _, *rows = done.stdout.splitlines()
    assert first == "request 3: 5 prompt tokens (0 cached), 4 output tokens, length, 5.000 s"
    assert [row.split()[:3] for row in rows] == [
        ["3.000", "2.000", "queued"], ["5.000", "1.000", "prefill"], ["6.000", "2.000", "decode"],
    ]  # fmt: skip
    assert "no row is free (2.000 s); behind " in rows[0]


def test_explain_as_json_adds_up(recorded: Path) -> None:
    (one,) = json.loads(run("explain", str(recorded), "3", "--json").stdout)["requests"]
    assert one["latency_ns"] == sum(one["split_ns"].values()) == 5_000_000_000
    assert [interval["phase"] for interval in one["intervals"]] == ["queued", "prefill", "decode"]
    assert len(json.loads(run("explain", str(recorded), "--json").stdout)["requests"]) == 3


def cells(page: Path) -> list[list[str]]:
    """Returns the rows of a page's tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.read_text())
    return [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]


def test_a_page_of_one_request_has_the_intervals_of_the_text(recorded: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run("explain", str(recorded), "3", "--html", str(page))
    assert done.exit_code == 0, done.stderr
    about, _, *printed = done.stdout.splitlines()
    (said,), heading, *rows = cells(page)
    assert said == about
    assert heading == ["from", "seconds", "phase", "steps", "tokens", ""]
    assert [" ".join(row).split() for row in rows] == [line.split() for line in printed]
    assert sum(float(row[1]) for row in rows) == 5.0
    assert not re.search(r"<script|(?:src|href)=\"(?!#)", page.read_text())


def test_a_page_without_a_request_has_all_of_them(recorded: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run("explain", str(recorded), "--html", str(page), "--json")
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["requests"]) == 3
    assert [row[0] for row in cells(page)] == ["request", "3", "1", "2"]


def test_the_name_of_a_file_is_text_in_a_page(recorded: Path, tmp_path: Path) -> None:
    page, name = tmp_path / "page.html", "<script>$x_{$ & 'y'.rec"
    recorded.rename(recorded.with_name(name))
    for asked in ((), ("2",)):
        done = run("explain", str(recorded.with_name(name)), *asked, "--html", str(page))
        assert done.exit_code == 0, done.stderr
        assert html.escape(name) in page.read_text()
        assert "<script" not in page.read_text()


def shown_bars(figure: Figure) -> list[list[tuple[float, float]]]:
    """Returns the bars of each panel's lines as first and last second."""
    return [
        [
            (float(path.get_extents().x0), float(path.get_extents().x1))
            for bars in panel.collections
            for path in bars.get_paths()
        ]
        for panel in figure.axes
    ]


@settings(max_examples=examples(30), deadline=None)
@given(workloads(cancels=True, faults=True))
def test_bars_of_a_request_cover_its_latency(workload: Workload) -> None:
    asked = workload.arrivals[-1].attempt
    found = Explanation(Recording.parse(driven(workload)), asked)
    one = found.timelines[asked]
    numbers = request_numbers([arrival.attempt for arrival in workload.arrivals])
    own, *_ = shown_bars(draw_request(found, numbers, one, "title"))
    assert len(own) == len(one.intervals)
    assert sum(end - start for start, end in own) == pytest.approx(one.latency / 1e9)


def test_bars_too_close_to_be_told_apart_are_one(recorded: Path) -> None:
    """A page has no 20,000 bars of 20,000 turns between two phases."""
    found = Explanation(read_recording(recorded))
    one = found.timelines[3]
    phases = TimelinePhase.DECODE, TimelinePhase.SAT_OUT
    one.intervals = [TimelineInterval(phases[n % 2], n * 1000, n * 1000 + 1000) for n in range(20_000)]
    (bars,) = shown_bars(draw_request(found, {1: 1, 2: 2, 3: 3}, one, "title"))
    assert len(bars) < 10_000
    assert (min(start for start, _ in bars), max(end for _, end in bars)) == pytest.approx((0, 0.02))


def test_a_page_needs_matplotlib(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.cli.charts.find_spec", lambda name: None)
    done = run("explain", str(recorded), "3", "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 1
    assert done.stderr.startswith("quire: --html needs matplotlib: ")


def test_explain_names_a_request_that_is_not_there(recorded: Path) -> None:
    done = run("explain", str(recorded), "9")
    assert done.exit_code == 1
    assert done.stderr == f"quire: {recorded}: there is no request 9; `quire explain {recorded}` lists all\n"


@pytest.mark.parametrize(("connections", "shown"), [((1, 1, 2), ["1", "2", "3"]), ((1, 1, 0), None)])
def test_explain_gives_requests_the_numbers_of_their_frontend(
    tmp_path: Path, connections: tuple[int, ...], shown: list[str] | None
) -> None:
    """All have those of their connections, where two frontends have the same number."""
    attempts = [connection << LOCAL_BITS | n for n, connection in enumerate(connections, 1)]
    if shown is None:
        attempts[2] = 2
    come = tuple(Arrival(attempt, n, make_request(attempt, 5, 4)) for n, attempt in enumerate(attempts, 1))
    path = tmp_path / "engine.rec"
    path.write_text("".join(played(replace(WORKLOAD, arrivals=come))))
    _, *rows = run("explain", str(path)).stdout.splitlines()
    assert sorted(row.split()[0] for row in rows) == (shown or sorted(str(attempt) for attempt in attempts))
    assert run("explain", str(path), rows[1].split()[0]).exit_code == 0


def test_explain_goes_up_to_a_difference_and_says_so(recorded: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join(line.replace('"step":4,', '"step":4,"freed":[3],') for line in lines))
    done = run("explain", str(recorded))
    assert done.exit_code == 0
    assert done.stderr == "quire: the replay differs at step 4, where this ends: see `quire replay`\n"
    assert "open" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the first line has no"), (b"\xff\xfe\n", "this is no text"), (b"{}\n", "the first line has no")],
)
@pytest.mark.parametrize("command", ["replay", "explain"])
def test_another_file_is_refused_by_its_name(tmp_path: Path, command: str, content: bytes, message: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    done = run(command, str(path))
    assert done.exit_code == 1
    assert done.stderr.startswith(f"quire: {path}: {message}")
    with pytest.raises(RecordingError):
        read_recording(path)


def test_changed_settings_are_simulated(recorded: Path) -> None:
    shown = run("replay", str(recorded), "--pages", "+50%")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[:2]] == ["recorded", "requests"]
    found = json.loads(run("replay", str(recorded), "--policy", "deadline", "--json").stdout)
    assert [*found] == ["recorded", "simulated", "with changes"]
    assert {side["requests"] for side in found.values()} == {3}
    assert {side["refused"] for side in found.values()} == {0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pages", "many"), "--pages is 'many', must be a number of pages, or a part such as +50% or -20%"),
        (("--pages", "-100%"), "--pages is '-100%', which leaves 0 pages of 8"),
        (("--policy", "best"), "--policy is 'best', must be one of"),
        (("--eviction-policy", "best"), "--eviction-policy is 'best', must be one of"),
        (("--max-sequences", "0"), "--max-sequences is 0, must be in"),
    ],
)
def test_wrong_changes_are_refused(recorded: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("replay", str(recorded), *arguments)
    assert done.exit_code == 1
    assert message in done.stderr
