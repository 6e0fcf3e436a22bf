"""Runs a batch job: reads lines, keeps the runner busy, writes results in order."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rpc.batch.failures import Failures
from rpc.batch.forms import read_lines
from rpc.batch.line import Answering, Line, Outcome
from rpc.batch.patience import JobStoppedError, Patience
from rpc.batch.results import OutputError, Results
from rpc.batch.retrying import RetryingRunner
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

    def add(self, line: Line, outcome: Outcome) -> None:
        if outcome.failed:
            self.errors += 1
            self.failures.add(line.index, line.id)
            return
        self.results += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.completion_tokens += outcome.completion_tokens


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
    answering = RetryingRunner(runner, patience)

    async def run(line: Line) -> None:
        try:
            text = await _answer(line, answering, tally)
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


async def _answer(line: Line, answering: Answering, tally: Tally) -> str:
    """Returns the output's line: a result, or why there is none. Raises JobStoppedError."""
    try:
        outcome = await line.run(answering)
    except RequestFailed as failure:
        outcome = Outcome(line.failed(failure), failed=True)
    except JobStoppedError:
        raise
    except Exception:  # whatever a line makes raise concerns this line
        log.exception("line %d failed", line.number)
        outcome = Outcome(line.failed(internal()), failed=True)
    tally.add(line, outcome)
    return outcome.text
