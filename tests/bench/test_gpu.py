"""The plain parts of the GPU's bench: what it counts, what it compares with, how it times, what it tells."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.on_gpu import sections, truth
from bench.on_gpu.bench import Bench
from bench.on_gpu.budget import Budget
from bench.on_gpu.engine import EngineRun, Moment
from bench.on_gpu.loads import alike, mixed
from bench.on_gpu.models import SHAPES, Costs
from bench.on_gpu.pages import Book
from bench.on_gpu.report import ATTENTION_GOAL, GOALS, Goal, Report, Table
from bench.on_gpu.serving import decode_steps
from bench.on_gpu.sizes import HOST, Mixed
from bench.on_gpu.timing import DeviceTimer, HostTimer, Timing, measure
from bench.on_gpu.truth import Error, Tolerance
from bench.on_gpu.tune import TRIED, candidates
from model.gpu.tuning import TileSizes, table
from model.kv_pool import to_eight_bit
from tests.model.test_attention import plain_attention

CPU = torch.device("cpu")


def bench_of(seconds: float = 100.0) -> Bench:
    return Bench(CPU, HOST, Budget(seconds), Report(), HostTimer())


def test_an_8b_model_costs_what_it_does() -> None:
    costs = Costs.of(SHAPES["llama-8b"])
    matrices = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    head = 128256 * 4096
    assert costs.weights == 2 * (matrices + head), "an embedding is not read as a whole"
    assert costs.file == costs.weights + 2 * head
    assert costs.token == 131_072
    assert costs.step_bytes(1000) == costs.weights + 131_072_000
    assert costs.prefill_operations(3) == 3 * 2 * matrices + 2 * head + 6 * 4 * 32 * 32 * 128
    assert costs.decode_operations(2, 10) == 2 * 2 * (matrices + head) + 10 * 4 * 32 * 32 * 128


def test_a_tied_output_layer_is_in_the_file_once() -> None:
    costs = Costs.of(SHAPES["llama-135m"])
    assert costs.file == costs.weights


def test_a_table_tells_what_failed_and_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("speeds", {"case": "", "ms": ".2f", "part": ".0%"})
    table.add(case="a|b", ms=1.234, part=0.5)
    with table.attempt("c"):
        raise RuntimeError("no | good\nat all")
    table.skip("d", "no time")
    table.notes.append("a note")
    lines = table.markdown().splitlines()
    assert lines[2:7] == [
        "| case | ms | part |",
        "|---|---|---|",
        "| a/b | 1.23 | 50% |",
        "| c | failed: RuntimeError: no / good at all |  |",
        "| d | skipped: no time |  |",
    ]
    assert lines[-1] == "a note"
    report = Report(tables=[table])
    assert report.failures == ["speeds: c: RuntimeError: no | good at all"]
    with pytest.raises(KeyError, match="speed"):
        table.add(case="e", speed=1)
    assert "Traceback" in capsys.readouterr().err, "a failure says where on standard error"


def test_json_has_all_of_it_and_is_json(tmp_path: Path) -> None:
    report = Report(facts={"device": "x"}, path=tmp_path / "found.json")
    table = Table("t", {"case": "", "error": ".1e"})
    table.add(case="a", error=math.nan)
    report.reached(Goal(ATTENTION_GOAL, 0.8, "case"))
    report.publish(table)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tables"] == [{"title": "t", "rows": [{"case": "a", "error": "nan"}], "notes": []}]
    assert [goal["verdict"] for goal in found["goals"]] == ["met", "not measured", "not measured"]


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ({}, "not measured"),
        ({"a": 0.9, "b": 0.75}, "met"),
        ({"a": 0.9, "b": 0.74}, "missed"),
        ({"a": math.nan}, "missed"),
    ],
)
def test_a_goal_is_met_where_the_least_case_meets_it(parts: dict[str, float], verdict: str) -> None:
    goal = Goal.least(ATTENTION_GOAL, parts)
    assert goal.verdict == verdict
    assert f"| {verdict} |" in goal.line()
    assert goal.about.startswith("b;" if len(parts) == 2 else "")


def test_time_runs_out() -> None:
    now = [5.0]
    budget = Budget(10.0, lambda: now[0])
    assert budget.allows(10.0)
    now[0] = 12.0
    assert budget.left == 3.0
    assert not budget.allows(3.5)
    assert budget.why_not(3.5) == "takes about 4 s, 3 s are left"


class Steps:
    """Instead of a timer: notes who was called."""

    def __init__(self) -> None:
        self.bursts: list[tuple[object, int]] = []

    def burst(self, work: Callable[[], object], calls: int) -> float:
        name = work()
        self.bursts.append((name, calls))
        return 1e-4 if name == "a" else 1.0


def test_works_take_turns_and_one_that_fails_is_told() -> None:
    def broken() -> None:
        raise RuntimeError("no kernel")

    timer = Steps()
    found = measure(timer, {"a": lambda: "a", "c": broken, "b": lambda: "b"}, 3)  # type: ignore[arg-type]
    assert found == {"a": Timing(1e-4, 1e-4, 1e-4), "b": Timing(1.0, 1.0, 1.0), "c": "RuntimeError: no kernel"}
    assert timer.bursts == [("a", 1), ("b", 1)] + [("a", 20), ("b", 1)] * 3, "short work is called several times"


def test_a_device_s_time_is_between_events_behind_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that does one thing after the other: a cycle takes a nanosecond, work takes 5 ms."""
    now, log = [0.0], list[str]()

    class Event:
        at = math.nan

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end.at - self.at)

    def sleep(cycles: int) -> None:
        now[0] += cycles * 1e-9
        log.append("delay")

    def work() -> None:
        now[0] += 5e-3
        log.append("work")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    timer = DeviceTimer()
    assert timer.cycles == pytest.approx(1e9)
    log.clear()
    assert timer.burst(work, 3) == pytest.approx(5e-3)
    assert log == ["wait", *["work"] * 3, "wait", "delay", "event", *["work"] * 3, "event", "wait"]


@pytest.mark.parametrize(("window", "start"), [(None, 0), (None, 7), (3, 7)])
def test_attention_in_float64(window: int | None, start: int) -> None:
    made = torch.Generator().manual_seed(0)
    queries = torch.randn((5, 6, 8), generator=made)
    keys, values = torch.randn((2, start + 5, 2, 8), generator=made)
    expected = plain_attention(*(part.double().numpy() for part in (queries, keys, values)), start, window)
    np.testing.assert_allclose(truth.attention(queries, keys, values, start, window).numpy(), expected, atol=1e-12)
    capped = truth.attention(queries, keys, values, start, window, cap=1e6)
    np.testing.assert_allclose(capped.numpy(), expected, atol=1e-9)
    assert not np.allclose(truth.attention(queries, keys, values, start, window, cap=0.5).numpy(), expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bits_are_those_of_the_pool(kind: str) -> None:
    rows = (
        torch.randn((50, 3, 64), generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 50)[:, None, None]
    )
    rows[0, 0] = 0.0
    found = truth.eight_bits(rows, kind)
    for part, expected in zip(found, to_eight_bit(rows.clone(), truth.EIGHT_BIT[kind][0]), strict=True):
        assert torch.equal(part, expected)
    assert (truth.stored(rows, kind) - rows).abs().max() < 0.1 * rows.abs().max()


def test_what_is_no_number_is_never_within_a_tolerance() -> None:
    expected, lax = torch.ones(4), Tolerance(1e9, 1e9)
    found = expected.clone()
    assert Error.of(found, expected) == Error(0.0, 0.0)
    found[2] = 3.0
    assert Error.of(found, expected) == Error(2.0, 1.0)
    found[2] = math.nan
    assert not Error.of(found, expected).within(lax)
    assert not Error.worst([Error(0.0, 0.0), Error.of(found, expected), Error(1.0, 0.0)]).within(lax)
    with pytest.raises(ValueError, match=r"shape \[3\], \[4\] is expected"):
        Error.of(found[:3], expected)


def test_pages_of_a_book_are_had_by_one_sequence_each() -> None:
    lengths = (33, 1, 16, 50)
    book = Book.of(lengths, 16, seed=3)
    slots = np.concatenate([book.slots(i, 0, length) for i, length in enumerate(lengths)])
    assert len(set(slots.tolist())) == sum(lengths)
    assert slots.max() < book.pages * 16
    shape = book.shape([(3, 48, 2), (0, 0, 33)])
    assert shape.slices[:, 1:].tolist() == [[48, 2], [0, 33]]
    assert shape.slots[0].tolist() == [*book.slots(3, 48, 2), *book.slots(0, 0, 33)]
    assert shape.positions.tolist() == [48, 49, *range(33)]
    left, lost = book.without(3, 2)
    assert lost.tolist() == book.table[book.rows[3], :2].tolist()
    assert not set(lost.tolist()) & set(left.table[left.rows[3]].tolist())


def test_a_seed_says_what_is_asked() -> None:
    load = Mixed(9, 3, (4, 8), (2, 5))
    asked = mixed("a", 1000, load)
    assert asked == mixed("a", 1000, load)
    assert asked != mixed("b", 1000, load)
    assert all(4 <= len(one.prompt) <= 8 and 2 <= one.tokens <= 5 and max(one.prompt) < 1000 for one in asked)
    same = alike("a", 1000, 3, 7, 2)
    assert [(len(one.prompt), one.tokens) for one in same] == [(7, 2)] * 3
    assert same[0].prompt != same[1].prompt, "a cache would answer it"


def test_steps_of_decodes_are_those_with_nothing_else_in_them() -> None:
    """Two sequences; the second one's prompt is computed in the steps that end at 1 and 2."""
    counts, times = [1, 1, 2, 2, 2, 2, 2, 1], [1.0, 2.0, 5.0, 6.0, 7.0, 7.5, 8.5, 9.0]
    moments = [Moment(at, np.arange(n), 0.1 * i) for i, (n, at) in enumerate(zip(counts, times, strict=True))]
    found = decode_steps(EngineRun(0.0, 9.0, moments, [], [], []), 2, 100)
    assert found.seconds == [0.5, 1.0]
    assert found.overheads == [0.5, pytest.approx(0.6)]
    assert found.context == 100 + (10 + 12) / 2 / 2
    with pytest.raises(RuntimeError, match="no step in which all of 3 sequences"):
        decode_steps(EngineRun(0.0, 9.0, moments, [], [], []), 3, 100)


def test_a_section_that_cannot_run_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Bench] = []
    monkeypatch.setattr("bench.on_gpu.budget.good", ran.append, raising=False)
    monkeypatch.setattr(
        sections, "SECTIONS",
        {"a": ("bench.on_gpu.no_such", "a", 1.0), "long": ("bench.on_gpu.budget", "good", 1e6),
         "c": ("bench.on_gpu.budget", "good", 1.0)},
    )  # fmt: skip
    bench = bench_of()
    sections.run_sections(bench, ["a", "long", "c"])
    assert ran == [bench]
    (failed, skipped) = bench.report.tables
    assert "ModuleNotFoundError" in failed.rows[0]["failed"]
    assert "takes about 1000000 s" in skipped.rows[0]["skipped"]
    assert len(bench.report.failures) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [((), "there is no CUDA device here"), (("--sections", "speed"), "--sections names speed; there are ceilings")],
)
@pytest.mark.slow
def test_what_it_cannot_do_is_one_line(given: tuple[str, ...], said: str) -> None:
    if torch.cuda.is_available() and not given:
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, "-m", "bench.gpu", *given], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line


def test_all_goals_stand_in_a_report() -> None:
    told = Report().goals_markdown()
    assert all(f"| {name} |" in told for name in GOALS)
    assert told.count("not measured") == 3


@pytest.mark.parametrize("kind", TRIED)
def test_sizes_that_are_tried_can_be_rows_of_the_table(kind: str) -> None:
    for row in table():
        now: TileSizes = getattr(row.tuning, kind)
        tried = list(candidates(kind, row.tuning))
        assert len(tried) == len(set(tried)) > 15
        assert {sizes.chunk for sizes in tried} == {now.chunk}, "results are grouped by them"
