"""Threads that compute the masks of a step's rows: the libraries let other threads run meanwhile."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

MOST_THREADS = 16  # a step's last mask alone takes longer than what more of them would save
WORTH = 0.0002  # seconds of one thread's work after which the others are woken, which takes some 0.05 ms

Item = TypeVar("Item")
Result = TypeVar("Result")


class MaskThreads:
    """Shares calls among a few threads, each of which takes the next one when it is free.

    A call stays on its thread, so the processor time of that thread is the call's own.
    """

    def __init__(self, threads: int) -> None:
        """Starts none yet. threads: together with the caller's."""
        self._others = min(threads, MOST_THREADS) - 1
        self._pool = ThreadPoolExecutor(max(1, self._others), thread_name_prefix="quire-masks")

    def map(self, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Calls with each item, and returns when all calls have.

        Args:
            call: It shares nothing that changes with the calls for other items.
            items: [n]. Short calls are all made by the caller's thread.

        Returns:
            [n] results, in the order of `items`.

        Raises:
            Exception: That of the first item whose call raises one. The other calls were made.
        """
        left = deque(enumerate(items))
        results = dict[int, Result]()
        faults = dict[int, Exception]()

        def work(until: float = float("inf")) -> None:
            while time.perf_counter() < until:
                try:
                    i, item = left.popleft()
                except IndexError:
                    return
                try:
                    results[i] = call(item)
                except Exception as fault:
                    faults[i] = fault

        work(time.perf_counter() + WORTH)
        others = [self._pool.submit(work) for _ in range(min(self._others, len(left) - 1))]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()
        if faults:
            raise faults[min(faults)]
        return [results[i] for i in range(len(items))]

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
