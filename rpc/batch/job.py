"""Runs a batch job: reads lines, keeps the runner busy, writes results in order."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quire.v1 import generation_service_pb2 as pb

from rpc.batch.failures import Failures
from rpc.batch.lines import Line, failure_line, read_lines, result_line
from rpc.batch.patience import LONGEST_PAUSE, PAUSE, SUSPECT, JobStoppedError, Patience
from rpc.batch.results import OutputError, Results
from rpc.batch.runners import Runner
from rpc.frontend.errors import RequestFailed, internal

log = logging.getLogger("quire.batch")

AHEAD = 4  # times the runner's requests in flight: how far results may come before their turn, held in memory


@dataclass(slots=True)
class Tally:
    """Progress of a job.

    Attributes:
        lines: Number of lines of the whole job.
        before: Number of results that earlier runs wrote.
        failures: Lines that failed, in this run and in earlier ones.
        results: Number of results of this run, those of failed lines excluded.
        errors: Number of lines that failed in this run.
        prompt_tokens: Prompt tokens of this run.
        completion_tokens: Generated tokens of this run.
    """

    lines: int = 0
    before: int = 0
    failures: Failures = field(default_factory=Failures)
    results: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def done(self) -> int:
        return self.before + self.results + self.errors

    def failed(self, line: Line) -> None:
        self.errors += 1
        self.failures.add(line.index, line.id)


def count_lines(path: Path) -> int:
    """Lines that are not blank. Raises OSError."""
    with path.open("rb") as file:
        return sum(1 for data in file if data.strip())


async def run_job(
    path: Path, results: Results, runner: Runner, patience: Patience, tally: Tally, show: Callable[[Tally], object]
) -> None:
    """Every line of the input that has no result yet gets one. show: told whenever the tally has changed.

    Raises JobStoppedError where it must stop for now, OSError, OutputError where the input has changed.
    """
    window, turn = asyncio.Semaphore(runner.in_flight), asyncio.Condition()

    async def run(line: Line) -> None:
        try:
            text = await _answer(line, runner, patience, tally)
        finally:
            window.release()
        results.add(line.index, text)
        show(tally)
        async with turn:
            turn.notify()

    try:
        async with asyncio.TaskGroup() as group:
            for line in read_lines(path):
                if results.has(line.index):
                    continue
                async with turn:
                    while line.index - results.next >= AHEAD * runner.in_flight:
                        await turn.wait()
                await window.acquire()
                group.create_task(run(line))
    except BaseExceptionGroup as failed:
        stopped, _ = failed.split(JobStoppedError)
        raise (stopped or failed).exceptions[0] from None
    if tally.done != tally.lines:
        raise OutputError(f"{path} has changed: {tally.lines} lines were counted in it, {tally.done} have results")
    results.complete()


async def _answer(line: Line, runner: Runner, patience: Patience, tally: Tally) -> str:
    """The line's result, or why it has none. Raises JobStoppedError."""
    try:
        response = await _run(line, runner, patience)
        text = result_line(line, response)
    except RequestFailed as failure:
        tally.failed(line)
        return failure_line(line, failure)
    except JobStoppedError:
        raise
    except Exception:  # whatever a line makes raise concerns this line
        log.exception("line %d failed", line.number)
        tally.failed(line)
        return failure_line(line, internal())
    tally.results += 1
    tally.prompt_tokens += response.usage.prompt_tokens
    tally.completion_tokens += response.usage.completion_tokens
    return text


async def _run(line: Line, runner: Runner, patience: Patience) -> pb.GenerateResponse:
    """Tries until there is an answer. Raises RequestFailed for one that will not change, JobStoppedError."""
    if line.request is None:
        raise line.failure or internal()
    if line.files:
        await asyncio.to_thread(line.read_files)
    deaths, pause = 0, PAUSE
    while True:
        suspect = deaths >= SUSPECT
        try:
            async with patience.turn(suspect):
                response = await runner.run(line.request)
        except RequestFailed as failure:
            if failure.retry_after is None:
                patience.succeeded()  # an answer, if a bad one
                raise
            if failure.reason == "ENGINE_FAILED":
                deaths += 1
                if suspect:
                    patience.died_alone(failure)
                    raise
            patience.busy(failure.message)
            await asyncio.sleep(max(pause, min(failure.retry_after, LONGEST_PAUSE)))
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            patience.succeeded()
            return response
