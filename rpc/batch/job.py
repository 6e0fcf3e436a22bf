"""Runs a batch job: reads lines, keeps the runner busy, writes results in order."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rpc.batch.failures import Failures
from rpc.batch.forms import read_lines
from rpc.batch.line import Answering, Line, Outcome
from rpc.batch.results import OutputError, OutputFile
from rpc.batch.retries import JobStoppedError, RetryPolicy
from rpc.batch.retrying import RetryingRunner
from rpc.batch.runners import RequestRunner
from rpc.frontend.errors import RequestFailed, internal

log = logging.getLogger("quire.batch")

AHEAD = 4  # results held in memory before their turn, as a multiple of the runner's requests in flight


@dataclass(slots=True)
class JobCounts:
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
        """Number of lines with a result, or an error in its place."""
        return self.before + self.results + self.errors

    def add(self, line: Line, outcome: Outcome) -> None:
        """Counts one line's outcome."""
        if outcome.failed:
            self.errors += 1
            self.failures.add(line.index, line.id)
            return
        self.results += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.completion_tokens += outcome.completion_tokens


def count_lines(path: Path) -> int:
    """Returns the number of lines that are not blank. Raises OSError."""
    with path.open("rb") as file:
        return sum(1 for data in file if data.strip())


async def run_job(
    path: Path,
    results: OutputFile,
    runner: RequestRunner,
    policy: RetryPolicy,
    counts: JobCounts,
    show: Callable[[JobCounts], object],
) -> None:
    """Runs every line of the input that has no result yet, and writes its result.

    Args:
        path: The input.
        results: The output.
        runner: Runs the requests.
        policy: Decides on retries, and when the job stops.
        counts: Progress, kept up to date.
        show: Called with `counts` after each line.

    Raises:
        JobStoppedError: The job cannot go on now.
        OSError: A file cannot be read or written.
        OutputError: The input has changed since its lines were counted.
    """
    window, turn = asyncio.Semaphore(runner.in_flight), asyncio.Condition()
    answering = RetryingRunner(runner, policy)

    async def run(line: Line) -> None:
        try:
            text = await _run_line(line, answering, counts)
        finally:
            window.release()
        results.add(line.index, text)
        show(counts)
        async with turn:
            turn.notify()

    try:
        async with asyncio.TaskGroup() as group:
            for line in read_lines(path):
                if results.has(line.index):
                    continue
                async with turn:  # one slow line must not fill memory with the results behind it
                    while line.index - results.next >= AHEAD * runner.in_flight:
                        await turn.wait()
                await window.acquire()
                group.create_task(run(line))
    except BaseExceptionGroup as failed:
        stopped, _ = failed.split(JobStoppedError)
        raise (stopped or failed).exceptions[0] from None
    if counts.done != counts.lines:
        raise OutputError(f"{path} has changed: {counts.lines} lines were counted in it, {counts.done} have results")
    results.complete()


async def _run_line(line: Line, answering: Answering, counts: JobCounts) -> str:
    """Runs one line, and returns the output's line: a result or an error. Raises JobStoppedError."""
    try:
        outcome = await line.run(answering)
    except RequestFailed as failure:
        outcome = Outcome(line.failed(failure), failed=True)
    except JobStoppedError:
        raise
    except Exception:  # an unexpected failure concerns this line alone; the job goes on
        log.exception("line %d failed", line.number)
        outcome = Outcome(line.failed(internal()), failed=True)
    counts.add(line, outcome)
    return outcome.text
