"""A server under overload: how requests are counted, and that a run has all figures."""

import json
import os
from itertools import islice, repeat
from pathlib import Path

import pytest

from bench import overload
from bench.overload import DEADLINES, OUTPUTS, PROMPT, deadline_of, requests, tree_bytes
from bench.overload_rows import COLUMNS, LATE, REFUSED, REFUSED_AT_ONCE, Row, ends_a_second, shares, table
from rpc.loadgen.drive import LoadRun
from rpc.loadgen.observation import Observation

IN_QUEUE = f"{REFUSED} QUEUE_TIMEOUT"
BEGIN = 100.0


def ended(at: float, code: str = "", tokens: int = 4, after: float = 1.0) -> Observation:
    """A request that ended `at` seconds after the load's begin, and was sent `after` seconds before."""
    end = BEGIN + at
    return Observation(end - after, (8, 4), sent=end - after, tokens=0 if code else tokens, ended=end, code=code)


def run_of(*seen: Observation) -> LoadRun:
    return LoadRun(scheduled=True, seen=[*seen], begin=BEGIN, end=BEGIN + 30)


def row_of(*seen: Observation, policy: str = "deadline", load: float = 1.0) -> Row:
    return Row.of(policy, load, run_of(*seen), (10.0, 20.0), 12.5, 3 * 2**20)


def test_each_request_is_counted_once() -> None:
    row = row_of(
        ended(11),
        ended(12, tokens=3),  # cut short: neither whole nor failed
        ended(13, REFUSED_AT_ONCE),
        ended(14, IN_QUEUE),
        ended(15, IN_QUEUE),
        ended(16, LATE),
        ended(17, "UNAVAILABLE"),
    )
    counts = row.in_time, row.refused_at_once, row.refused_waiting, row.late, row.other
    assert counts == (1, 1, 2, 1, 2)
    assert sum(counts) == row.requests == 7
    assert (row.memory_mib, row.rate) == (3.0, 12.5)


def test_goodput_is_of_whole_requests_that_ended_in_the_window() -> None:
    run = run_of(ended(9.9), ended(10.0), ended(19.9), ended(20.0), ended(15, IN_QUEUE), ended(15, tokens=2))
    assert ends_a_second(run, (10.0, 20.0)) == pytest.approx(0.2)


def test_times_of_refusals_are_of_those_that_came_at_once() -> None:
    row = row_of(
        *(ended(11, REFUSED_AT_ONCE, after=i / 1000) for i in range(1, 102)), ended(12, IN_QUEUE, after=4), ended(13)
    )
    assert row.refusals_ms == pytest.approx((51.0, 100.0, 101.0))
    assert row_of(ended(11), ended(12, IN_QUEUE)).refusals_ms is None


def test_shares_are_of_the_policys_own_peak() -> None:
    def rows_of(policy: str, *counts: int) -> list[Row]:
        return [row_of(*repeat(ended(11), count), policy=policy, load=i) for i, count in enumerate(counts)]

    rows = [*rows_of("deadline", 10, 8, 9), *rows_of("first-come", 4, 1), *rows_of("fair", 0, 0)]
    assert shares(rows) == pytest.approx([1.0, 0.8, 0.9, 1.0, 0.25, 0.0, 0.0])


def test_the_table_has_a_cell_for_each_column() -> None:
    lines = table([row_of(ended(11)), row_of(ended(11, REFUSED_AT_ONCE, after=0.02), load=5.0)]).splitlines()
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
    assert lines[2].startswith("| deadline | 1 | 12.5 | 0.1 | 100 % | 1 | 1 | 0 |")
    assert lines[3].endswith("| 20.0 | 20.0 | 20.0 | 3 |")


def test_requests_are_the_same_in_each_run_and_share_no_prefix() -> None:
    some, again = (list(islice(requests(repeat(0.0)), 50)) for _ in range(2))
    assert some == again
    assert len({tuple(one.prompt[:4]) for one in some}) == 50
    assert all(len(one.prompt) == PROMPT and OUTPUTS[0] <= one.output <= OUTPUTS[1] for one in some)
    deadlines = [deadline_of(one.number) for one in some]
    assert len(set(deadlines)) == 50
    assert min(deadlines) >= DEADLINES[0]
    assert max(deadlines) <= DEADLINES[1]


def test_memory_is_of_processes_that_are_there() -> None:
    assert tree_bytes(os.getpid()) > 2**20
    assert tree_bytes(2**22 + 1) == 0  # above the highest process id


@pytest.mark.slow
def test_a_run_offers_each_load_to_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overload, "CAPACITY_SECONDS", 4.0)
    monkeypatch.setattr(overload, "CAPACITY_START", 1.0)
    monkeypatch.setattr(overload, "START", 2.0)
    overload.main("deadline", "0.2,4", seconds=3.0, file=tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    calm, flooded = written["rows"]
    assert (calm["policy"], calm["load"], flooded["load"]) == ("deadline", 0.2, 4.0)
    assert flooded["rate"] == pytest.approx(4 * written["capacity"])
    assert calm["in_time"] > 0
    assert calm["other"] == flooded["other"] == 0
    assert flooded["refused_at_once"] + flooded["refused_waiting"] > 0
    assert calm["memory_mib"] > 20
    assert capsys.readouterr().out.count("\n| deadline ") == 2
