"""Large work on the event loop, in turns that are short enough for all other requests."""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Work = Generator[None, None, T]
"""Yields wherever it may be interrupted, some hundred microseconds apart at most, and returns its result."""

TURN_SECONDS = 0.002


class Pacer:
    """Runs large work, such as a result with 150,000 logprobs, without holding up the loop.

    Such work is pure Python, so a thread would hold the interpreter lock for as long. Small work ends in its first
    turn. Larger work runs one piece at a time, first come first served: many pieces together would make each turn of
    the loop long.

    Attributes:
        turn: Seconds of work after which the loop serves others.
    """

    def __init__(self, turn: float = TURN_SECONDS) -> None:
        self.turn, self._large_work = turn, asyncio.Lock()

    async def run(self, work: Work[T]) -> T:
        """Runs work to its end. Returns its result, and raises its exceptions."""
        try:
            self._advance(work)
            async with self._large_work:
                while True:
                    await asyncio.sleep(0)
                    self._advance(work)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            work.close()

    def _advance(self, work: Work[T]) -> None:
        """Runs one turn of the work. Raises StopIteration at its end."""
        until = time.perf_counter() + self.turn
        next(work)
        while time.perf_counter() < until:
            next(work)
