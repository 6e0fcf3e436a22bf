"""Runs a batch job: reads lines, keeps the runner busy, writes results in order."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rpc.batch.lines import Line, failure_line, read_lines, result_line
from rpc.batch.results import Results
from rpc.batch.runners import Runner, ServerLostError
from rpc.frontend.errors import RequestFailed

AHEAD = 4  # times the runner's requests in flight: how far results may come before their turn, held in memory
TRIES = 30  # for what the failure says may be tried again: a full queue, a server that drains
ENGINE_TRIES = 3  # for an engine that died: the request may be why
LONGEST_PAUSE = 10.0  # seconds between two tries


@dataclass(slots=True)
class Tally:
    """lines: of the whole job. before: results that were there. results and errors: of this run, as tokens is."""

    lines: int = 0
    before: int = 0
    results: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def done(self) -> int:
        return self.before + self.results + self.errors


def count_lines(path: Path) -> int:
    """Lines that are not blank. Raises OSError."""
    with path.open("rb") as file:
        return sum(1 for data in file if data.strip())


async def run_job(path: Path, results: Results, runner: Runner, tally: Tally, show: Callable[[Tally], object]) -> None:
    """Every line of the input that has no result yet gets one. show: told whenever the tally has changed.

    Raises ServerLostError where the runner is lost, OSError.
    """
    window, turn = asyncio.Semaphore(runner.in_flight), asyncio.Condition()

    async def run(line: Line) -> None:
        try:
            text = await _answer(line, runner, tally)
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
        raise failed.exceptions[0] from None
    results.complete()


async def _answer(line: Line, runner: Runner, tally: Tally) -> str:
    """The line's result, or why it has none."""
    if line.request is None:
        tally.errors += 1
        return failure_line(line, line.failure or RequestFailed("INTERNAL", "INTERNAL", "the line was not read"))
    tries = 0
    while True:
        tries += 1
        try:
            response = await runner.run(line.request)
        except RequestFailed as failure:
            most = ENGINE_TRIES if failure.reason == "ENGINE_FAILED" else TRIES
            if failure.retry_after is None or tries >= most:
                if failure.code == "UNAVAILABLE" and failure.reason != "ENGINE_FAILED":
                    raise ServerLostError(failure.message) from None
                tally.errors += 1
                return failure_line(line, failure)
            await asyncio.sleep(min(tries * failure.retry_after, LONGEST_PAUSE))
        else:
            tally.results += 1
            tally.prompt_tokens += response.usage.prompt_tokens
            tally.completion_tokens += response.usage.completion_tokens
            return result_line(line, response)
