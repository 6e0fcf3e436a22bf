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

    Such work is Python's own, so in a thread it would hold the interpreter lock for as long. Small work ends in its
    first turn. Of larger work one piece runs at a time, first come first served: together, many would make each turn of
    the loop long.
    """

    def __init__(self, turn: float = TURN_SECONDS) -> None:
        """turn: seconds after which the loop serves others."""
        self._turn, self._line = turn, asyncio.Lock()

    async def run(self, work: Work[T]) -> T:
        """Returns what the work returns; raises what it raises."""
        try:
            self._advance(work)
            async with self._line:
                while True:
                    await asyncio.sleep(0)
                    self._advance(work)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            work.close()

    def _advance(self, work: Work[T]) -> None:
        """One turn. Raises StopIteration at the work's end."""
        until = time.perf_counter() + self._turn
        next(work)
        while time.perf_counter() < until:
            next(work)
