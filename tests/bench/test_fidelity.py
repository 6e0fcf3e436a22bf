"""Simulated beside measured latencies: rows, the file of a run that is cut, and the time that loads may take."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from bench import fidelity
from bench.fidelity import LEAST_CONTEXT, full_speed, plan, simulate
from bench.fidelity_rows import CASES, Compared, Report, Row, header, write_arrivals
from bench.shapes import MODELS
from rpc.loadgen.drive import LoadRun
from rpc.loadgen.observation import Observation
from rpc.loadgen.traces import read_trace
from rpc.simulation.served import Ledger, Serving
from scheduler.preemption_cause import PreemptionCause
from scheduler.profile import Profile, read_profile

TINY = MODELS["llama-135m"] | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 2048}


def run_of(*times: tuple[float, float, int], failed: int = 0) -> LoadRun:
    """A run with requests of first and last seconds, and tokens; and with some that failed."""
    run = LoadRun(scheduled=True, begin=0.0, end=10.0)
    for first, last, tokens in times:
        run.seen.append(Observation(1.0, (4, tokens), times=[1 + first, 1 + last], tokens=tokens, ended=1 + last))
    run.seen += [Observation(1.0, (4, 4), ended=2.0, code="UNAVAILABLE")] * failed
    return run


def served_of(*times: tuple[float, float, int]) -> Serving:
    ledger = Ledger(len(times))
    ledger.came[:] = 1.0
    for i, (first, last, tokens) in enumerate(times):
        ledger.first[i], ledger.last[i], ledger.tokens[i] = 1 + first, 1 + last, tokens
    return Serving(ledger, 10.0, 0, 0, 0, 10.0, 10.0, dict.fromkeys(PreemptionCause, 0))


TIMES = [(0.1 * i, 0.1 * i + 0.02 * i * 9, 10) for i in range(1, 101)]


def test_a_simulation_that_is_right_has_no_error() -> None:
    row = Row.of("azure-conv", 0.5, 64, run_of(*TIMES), served_of(*TIMES))
    assert [round(one.error, 6) for one in row.latencies.values()] == [0.0] * 4
    assert row.latencies["TTFT p50"].measured == pytest.approx(1000 * np.percentile([t[0] for t in TIMES], 50))
    assert row.latencies["TPOT p99"].measured == pytest.approx(20 * np.percentile(range(1, 101), 99))


def test_an_error_is_of_the_measured_latency() -> None:
    slower = [(1.1 * first, 1.1 * first + 0.8 * (last - first), tokens) for first, last, tokens in TIMES]
    row = Row.of("azure-conv", 0.5, 64, run_of(*TIMES), served_of(*slower))
    errors = {name: round(one.error, 6) for name, one in row.latencies.items()}
    assert errors == {"TTFT p50": 10.0, "TTFT p99": 10.0, "TPOT p50": -20.0, "TPOT p99": -20.0}


def test_failed_requests_have_no_latency_and_are_counted() -> None:
    row = Row.of("azure-conv", 1.5, 64, run_of(*TIMES, failed=3), served_of(*TIMES))
    assert (row.requests, row.failed, row.failed_simulated) == (103, 3, 0)
    assert row.latencies["TTFT p50"].error == pytest.approx(0)
    assert row.markdown().startswith("| azure-conv | 1.5 | 64 | 103 | 1 | 0 / 3 |")
    assert row.markdown().count("|") == header().splitlines()[0].count("|") == header().splitlines()[1].count("|")


def test_a_load_without_tokens_has_no_row() -> None:
    with pytest.raises(ValueError, match="no request has a TTFT"):
        Row.of("azure-conv", 1.5, 64, run_of(failed=3), served_of(*TIMES))


def test_a_file_has_all_rows_after_each_one(tmp_path: Path) -> None:
    report = Report(file := tmp_path / "rows.json", {"model": "tiny"})
    report.calibrated("azure-conv", 40, "Fitted.")
    for count in (1, 2):
        report.add(Row.of("azure-conv", count / 2, 64, run_of(*TIMES), served_of(*TIMES)))
        written = json.loads(file.read_text())
        assert [row["load"] for row in written["rows"]] == [0.5, 1.0][:count]
        assert (written["whole"], written["model"]) == (False, "tiny")
    assert written["calibrations"]["azure-conv"] == {"requests": 40, "fit": "Fitted."}
    assert [*tmp_path.iterdir()] == [file]


def test_the_summary_names_the_worst_of_each_percentile() -> None:
    report = Report(None, {})
    for load, error in ((0.5, 3.0), (1.5, -7.0)):
        other = Compared(100.0, 100.0)
        latencies = {"TTFT p50": Compared(100.0, 100.0 + error), "TTFT p99": other, "TPOT p50": other}
        report.add(Row("mooncake", load, 64, 9, 0, 0, 1.0, latencies | {"TPOT p99": Compared(100.0, 100 + 2 * error)}))
    assert report.summary() == (
        "costs as calibrated: largest error of a p50: 7.0 % (TTFT p50, mooncake at load 1.5); "
        "largest error of a p99: 14.0 % (TPOT p99, mooncake at load 1.5)"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.trace)
def test_requests_that_calibrate_are_not_measured(case: fidelity.Case, tmp_path: Path) -> None:
    first, second = case.parts(160)
    assert (len(first), len(second), second[0].at) == (case.calibrating, 160, 0.0)
    whole = [one for one in read_trace(case.trace) if case.longest is None or one.prompt + one.output <= case.longest]
    behind = whole[len(first) : len(first) + 160]
    assert [(one.prompt, one.output, one.blocks) for one in second] == [
        (one.prompt, one.output, one.blocks) for one in behind
    ]
    read = read_trace(write_arrivals(tmp_path / "some.jsonl", second))
    assert [one.at for one in read] == pytest.approx([one.at for one in second])
    assert [replace(one, at=0.0) for one in read] == [replace(one, at=0.0) for one in second]


def test_a_trace_with_too_few_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at most 160: azure-conv"):
        CASES[0].parts(161)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_profile("llama-3.1-8b-h100")


def test_loads_are_parts_of_what_an_engine_can_take(profile: Profile) -> None:
    _, arrivals = CASES[0].parts(60)
    full = full_speed(profile, arrivals, 256)
    at_once = simulate(profile, arrivals, 256, 1e6).seconds
    assert arrivals[-1].at / full == pytest.approx(at_once)
    planned = plan(profile, arrivals, (0.5, 2.0), 256, 1e9)
    assert {load: one.speed / full for load, one in planned.items()} == pytest.approx({0.5: 0.5, 2.0: 2.0})
    assert planned[0.5].served.seconds >= 2 * at_once * 0.99
    assert planned[0.5].served.firsts.mean() < planned[2.0].served.firsts.mean()


def test_the_context_shrinks_until_the_loads_fit_the_time(profile: Profile) -> None:
    _, arrivals = CASES[0].parts(60)

    def planned(seconds: float) -> tuple[int, float]:
        found = plan(profile, arrivals, (0.5, 1.5), 1024, seconds).values()
        return next(iter(found)).context, sum(one.served.seconds for one in found)

    context, total = planned(1e9)
    assert context == 1024
    less, fitting = planned(0.6 * total)
    assert LEAST_CONTEXT < less < 1024
    assert fitting <= 0.6 * total
    assert planned(0.0)[0] == LEAST_CONTEXT


@pytest.mark.slow
def test_a_run_compares_real_servers_with_their_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "tiny", TINY)
    monkeypatch.setattr(fidelity, "CASES", tuple(replace(case, calibrating=20) for case in CASES))
    fidelity.main("tiny", "1.5", requests=12, context=128, minutes=0.0, file=tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["whole"]
    assert [(row["trace"], row["requests"], row["failed"]) for row in written["rows"]] == [
        *2 * [("azure-conv", 12, 0)],
        *2 * [("mooncake", 12, 0)],
    ]
    assert {row["context"] for row in written["rows"]} == {LEAST_CONTEXT}  # no time was left for more
    assert all(len(row["errors_percent"]) == 4 for row in written["rows"])
    assert capsys.readouterr().out.count("\n| ") == 5


@pytest.mark.slow
def test_a_cut_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row(*arguments: object) -> None:
        report = next(one for one in arguments if isinstance(one, Report))
        if report.rows:
            raise fidelity.Cut
        report.add(Row.of("azure-conv", 0.5, 64, run_of(*TIMES), served_of(*TIMES)))

    monkeypatch.setitem(MODELS, "tiny", TINY)
    monkeypatch.setattr(fidelity, "compare", one_row)
    with pytest.raises(typer.Exit):
        fidelity.main("tiny", "1.5", requests=12, context=128, minutes=1.0, file=tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert (written["whole"], len(written["rows"])) == (False, 1)
