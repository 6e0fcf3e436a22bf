"""Law of a batch job: whatever order results come in, wherever it is killed, each line gets one result, in order, and
nothing that was written down is asked for again.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import model_service_pb2 as model_pb

import rpc.batch.job as job
import rpc.batch.retrying as retrying
from rpc.batch.failures import Failures
from rpc.batch.forms import read_lines
from rpc.batch.job import JobCounts, count_lines, run_job
from rpc.batch.results import OutputError, OutputFile
from rpc.batch.retries import JobStoppedError, RetryPolicy
from rpc.frontend.errors import RequestFailed
from tests.support.examples import examples


class Killed(BaseException):
    """Stands for a process that dies: nothing after it is done."""


class FakeRunner:
    """Answers with the prompt's text, in a random order; dies after a number of answers."""

    def __init__(self, seed: int, lives: int = 10**9, in_flight: int = 8) -> None:
        self.in_flight, self._rng, self._lives = in_flight, random.Random(seed), lives
        self.asked: Counter[str] = Counter()
        self.most, self._now = 0, 0
        self.failures: dict[str, list[BaseException]] = {}

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        text = request.spec.text
        self.asked[text] += 1
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            for _ in range(self._rng.randrange(12)):
                await asyncio.sleep(0)
            if self.failures.get(text):
                raise self.failures[text].pop(0)
            if self._lives == 0:
                raise Killed
            self._lives -= 1
            result = pb.SequenceResult(text=text, finish_reason=pb.FINISH_REASON_LENGTH)
            return pb.GenerateResponse(sequences=[result], usage=pb.Usage(completion_tokens=1))
        finally:
            self._now -= 1

    async def ask(self, stub: type, method: str, request: Any, metadata: Any) -> Any:
        return model_pb.ListModelsResponse()


def write_input(path: Path, lines: int, bad: set[int] = frozenset(), openai: bool = False) -> Path:
    """openai: in the form of OpenAI's Batch API."""

    def line(i: int) -> dict[str, Any]:
        if not openai:
            return {"id": f"n{i}", "prompt": f"p{i}"}
        return {"custom_id": f"n{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}

    texts = ["{" if i in bad else json.dumps(line(i)) for i in range(lines)]
    path.write_text("\n".join(texts) + "\n")
    return path


def text_of(value: dict[str, Any]) -> str | None:
    """Returns the text of a result in either form; None for an error."""
    if value.get("response"):
        text: str = value["response"]["body"]["choices"][0]["text"]
        return text
    return value.get("text")


def run(source: Path, output: Path, runner: FakeRunner) -> JobCounts:
    with OutputFile(output) as results:
        counts = JobCounts(count_lines(source), results.resume(read_lines(source)), results.failures)
        asyncio.run(run_job(source, results, runner, RetryPolicy(), counts, lambda counts: None))
    return counts


def texts(output: Path) -> list[str]:
    values = [json.loads(line) for line in output.read_text().splitlines()]
    return [text_of(value) or "error" for value in values]


def on_disk(output: Path) -> set[str]:
    """Texts of all results that were written to their end, in their place or beside it."""
    waiting = output.with_name("out.waiting")
    lines = output.read_text().splitlines(keepends=True)
    if waiting.exists():
        lines += [entry.split("\t", 1)[-1] for entry in waiting.read_text().splitlines(keepends=True)]
    return {text_of(json.loads(line)) for line in lines if line.endswith("\n")}


def tear(path: Path, count: int) -> None:
    """Cuts the end off, as a process leaves it that was killed while it wrote."""
    path.write_bytes(path.read_bytes()[:-count] if count else path.read_bytes())


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_results_stand_in_order_and_nothing_is_computed_twice(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("job")
    lines = data.draw(st.integers(0, 60))
    bad = data.draw(st.sets(st.integers(0, lines), max_size=5))
    source = write_input(directory / "in", lines, bad, openai=data.draw(st.booleans()))
    output, waiting = directory / "out", directory / "out.waiting"
    written: set[str] = set()
    for seed in range(200):
        runner = FakeRunner(seed, lives=data.draw(st.integers(1, 30)), in_flight=data.draw(st.integers(1, 9)))
        complete = False
        with suppress(Killed):
            complete = run(source, output, runner).done == lines
        assert not written & runner.asked.keys(), "a result that was on disk was computed again"
        assert runner.most <= runner.in_flight
        if complete:
            break
        torn = data.draw(st.sampled_from((output, waiting)))
        if torn.exists():
            tear(torn, data.draw(st.integers(0, 9)))
        written = on_disk(output)
    assert texts(output) == ["error" if i in bad else f"p{i}" for i in range(lines)]
    assert sorted(path.name for path in directory.iterdir()) == ["in", "out"]


def test_a_torn_waiting_line_is_cut_before_more_are_written(tmp_path: Path) -> None:
    source, output, waiting = write_input(tmp_path / "in", 9), tmp_path / "out", tmp_path / "out.waiting"
    output.write_text('{"id": "n0", "text": "p0"}\n')
    waiting.write_text('4\t{"id": "n4", "text": "p4"}\n6\t{"id": "n')
    for index in (7, 8):
        with OutputFile(output) as results:
            assert results.resume(read_lines(source)) == index - 5
            assert not results.has(6)
            results.add(index, json.dumps({"id": f"n{index}", "text": f"p{index}"}))
    runner = FakeRunner(0)
    run(source, output, runner)
    assert texts(output) == [f"p{i}" for i in range(9)]
    assert runner.asked.keys() == {"p1", "p2", "p3", "p5", "p6"}


def test_a_result_is_on_disk_when_it_has_been_added(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out") as results:
        results.add(1, '{"id": "n1"}')
        assert (tmp_path / "out.waiting").read_text() == '1\t{"id": "n1"}\n'
        results.add(0, '{"id": "n0"}')
        assert (tmp_path / "out").read_text() == '{"id": "n0"}\n{"id": "n1"}\n'
        assert (tmp_path / "out.waiting").read_text() == ""


def test_blank_lines_are_passed_over_and_ids_default_to_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('\n{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert run(tmp_path / "in", tmp_path / "out", FakeRunner(0)).results == 2
    assert [json.loads(line)["id"] for line in (tmp_path / "out").read_text().splitlines()] == [2, 5]


@pytest.mark.parametrize("openai", [False, True])
def test_a_file_has_the_form_of_its_first_object_and_no_other(tmp_path: Path, openai: bool) -> None:
    source = write_input(tmp_path / "in", 2, bad={0}, openai=openai)
    other = write_input(tmp_path / "other", 1, openai=not openai).read_text()
    source.write_text(source.read_text() + other)
    counts = run(source, tmp_path / "out", FakeRunner(0))
    assert (counts.results, str(counts.failures)) == (1, "1, 3")
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert {"custom_id" in result for result in results} == {openai}
    assert "line 3" in results[2]["error"]["message"]
    assert "mixes no forms" in results[2]["error"]["message"]
    assert str(run(source, tmp_path / "out", FakeRunner(0)).failures) == "1, 3"


def test_refused_lines_of_openais_form_are_counted_over_all_runs(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "n": "one"}}
    (tmp_path / "in").write_text(json.dumps(line) + "\n")
    assert str(run(tmp_path / "in", tmp_path / "out", FakeRunner(0)).failures) == "'a'"
    assert str(run(tmp_path / "in", tmp_path / "out", FakeRunner(0)).failures) == "'a'"


def test_another_jobs_output_is_not_gone_on_with(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", 5)
    (tmp_path / "out").write_text('{"id": "n0"}\n{"id": "other"}\n')
    with pytest.raises(OutputError, match="result 2 is of id 'other', the input has id 'n1' there"):
        run(source, tmp_path / "out", FakeRunner(0))
    (tmp_path / "out").write_text("".join(f'{{"id": "n{i}"}}\n' for i in range(6)))
    with pytest.raises(OutputError, match="no such line"):
        run(source, tmp_path / "out", FakeRunner(0))
    (tmp_path / "out").write_text("my diary\n")
    with pytest.raises(OutputError, match="another job's"):
        run(source, tmp_path / "out", FakeRunner(0))
    assert (tmp_path / "out").read_text() == "my diary\n"


def test_two_jobs_do_not_write_one_file(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out"), pytest.raises(OutputError, match="another process"):
        OutputFile(tmp_path / "out")


def test_failed_lines_are_counted_over_all_runs_and_the_first_ones_are_named(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in", 20, bad={1, 3, 9, 12, 13, 19}), tmp_path / "out"
    with suppress(Killed):
        run(source, output, FakeRunner(3, lives=8, in_flight=3))
    counts = run(source, output, FakeRunner(4))
    assert 0 < counts.errors < 6, "both runs had lines that failed"
    assert counts.failures.count == 6
    assert str(counts.failures) == "2, 4, 10, 13, 14 and 1 more"
    again = run(source, output, FakeRunner(5))
    assert (again.done, again.errors, str(again.failures)) == (20, 0, str(counts.failures))


def test_ids_of_failed_lines_are_cut_in_messages() -> None:
    failures = Failures()
    failures.add(1, "\x1b[2J" + 100 * "n")
    failures.add(0, 7)
    assert str(failures) == "7, '\\x1b[2J" + 49 * "n" + "..."


def refused(reason: str, code: str = "RESOURCE_EXHAUSTED") -> RequestFailed:
    return RequestFailed(code, reason, "come again", retry_after=0.0)


NO_ENGINE = refused("ENGINE_FAILED", "UNAVAILABLE")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE", 0.0)


@pytest.mark.usefixtures("no_pauses")
def test_what_passes_by_itself_is_waited_for_and_what_does_not_is_an_error(tmp_path: Path) -> None:
    source, runner = write_input(tmp_path / "in", 5), FakeRunner(0)
    runner.failures = {
        "p0": [refused("QUEUE_FULL")] * 100,
        "p1": [NO_ENGINE] * 2,
        "p2": [RequestFailed("INTERNAL", "QUARANTINED", "engines died")],
        "p3": [RequestFailed("INTERNAL", "REQUEST_FAULT", "no")],
        "p4": [KeyError("a bug")],
    }
    counts = run(source, tmp_path / "out", runner)
    assert (counts.results, counts.errors) == (2, 3)
    assert texts(tmp_path / "out") == ["p0", "p1", "error", "error", "error"]
    assert runner.asked == {"p0": 101, "p1": 3, "p2": 1, "p3": 1, "p4": 1}


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("in_flight", [1, 8])
def test_an_outage_of_the_engines_costs_no_line_its_result(tmp_path: Path, in_flight: int) -> None:
    source, runner = write_input(tmp_path / "in", 30), FakeRunner(0, in_flight=in_flight)
    runner.failures = {f"p{i}": [NO_ENGINE] * 20 for i in range(30)}
    counts = run(source, tmp_path / "out", runner)
    assert (counts.results, counts.errors) == (30, 0)
    assert set(runner.asked.values()) == {21}


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_stays_away_stops_the_job_not_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.batch.retries.BUSY", 0.05)
    source, runner = write_input(tmp_path / "in", 30), FakeRunner(0)
    runner.failures = {f"p{i}": [refused("DRAINING", "UNAVAILABLE")] * 10**6 for i in range(20, 30)}
    with pytest.raises(JobStoppedError, match="nothing has succeeded"):
        run(source, tmp_path / "out", runner)
    assert texts(tmp_path / "out") == [f"p{i}" for i in range(20)]
    run(source, tmp_path / "out", FakeRunner(1))
    assert texts(tmp_path / "out") == [f"p{i}" for i in range(30)]


def test_what_waited_for_another_output_or_input_is_not_taken(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in", 5), tmp_path / "out"
    (tmp_path / "out.waiting").write_text('3\t{"id": "OLD"}\n')
    assert run(source, output, FakeRunner(0)).results == 5, "the output was removed: it starts anew"
    for entry in ('3\t{"id": "OLD"}\n', '9\t{"id": "n9"}\n', "my diary\n"):
        output.write_text('{"id": "n0"}\n')
        (tmp_path / "out.waiting").write_text(entry)
        with pytest.raises(OutputError):
            run(source, output, FakeRunner(0))
        assert output.read_text() == '{"id": "n0"}\n'


def test_a_file_that_is_no_output_is_left_as_it_is(tmp_path: Path) -> None:
    for text in ("notes", "a\nnotes", '{"id": "n0"}\nnotes'):
        (tmp_path / "out").write_text(text)
        with pytest.raises(OutputError):
            run(write_input(tmp_path / "in", 3), tmp_path / "out", FakeRunner(0))
        assert (tmp_path / "out").read_text() == text


def test_an_input_that_changes_meanwhile_does_not_pass_for_done(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", 5)
    with OutputFile(tmp_path / "out") as results:
        counts = JobCounts(count_lines(source), results.resume(read_lines(source)))
        write_input(source, 3)
        with pytest.raises(OutputError, match="has changed: 5 lines were counted in it, 3 have results"):
            asyncio.run(run_job(source, results, FakeRunner(0), RetryPolicy(), counts, lambda counts: None))


def test_results_run_ahead_only_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow line must not make the job hold all others' results."""
    monkeypatch.setattr(job, "AHEAD", 2)

    class Slow(FakeRunner):
        ahead = 0

        async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
            while request.spec.text == "p0" and len(self.asked) < 2 * self.in_flight - 1:
                await asyncio.sleep(0)
            if request.spec.text == "p0":
                for _ in range(1000):
                    await asyncio.sleep(0)
                self.ahead = len(self.asked)
            return await super().run(request)

    runner = Slow(0, in_flight=5)
    run(write_input(tmp_path / "in", 50), tmp_path / "out", runner)
    assert runner.ahead == 2 * 5 - 1
    assert texts(tmp_path / "out") == [f"p{i}" for i in range(50)]
