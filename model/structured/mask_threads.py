"""Threads that compute the masks of a step's rows: the libraries let other threads run meanwhile."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

MOST_THREADS = 16  # a step's last mask alone takes longer than what more of them would save
WORTH = 0.0002  # seconds of one thread's work after which the others are woken, which takes some 0.05 ms

Item = TypeVar("Item")
Result = TypeVar("Result")


class MaskThreads:
    """Shares calls among a few threads, each of which takes the next one when it is free.

    A call stays on its thread, so the processor time of that thread is the call's own.

    Attributes:
        count: Threads, together with the caller's.
    """

    def __init__(self, threads: int) -> None:
        """Starts none yet. threads: together with the caller's."""
        self.count = min(threads, MOST_THREADS)
        self._others = self.count - 1
        self._pool = ThreadPoolExecutor(max(1, self._others), thread_name_prefix="quire-masks")

    def map(self, call: Callable[[Item], Result], items: Sequence[Item], locks: Sequence[int]) -> list[Result]:
        """Calls with each item, and returns when all calls have.

        Args:
            call: It shares nothing that changes with the calls for other items.
            items: [n]. Short calls are all made by the caller's thread.
            locks: [n] Equal numbers for items whose calls wait for each other: a thread takes others where it can.

        Returns:
            [n] results, in the order of `items`.

        Raises:
            Exception: That of the first item whose call raises one. The other calls were made.
        """
        left = _Queues(locks)
        results = dict[int, Result]()
        faults = dict[int, Exception]()

        def work(thread: int, until: float = float("inf")) -> None:
            while time.perf_counter() < until and (i := left.take(thread)) is not None:
                try:
                    results[i] = call(items[i])
                except Exception as fault:
                    faults[i] = fault

        work(0, time.perf_counter() + WORTH)
        more = min(self._others, len(items) - len(results) - len(faults) - 1)
        others = [self._pool.submit(work, thread) for thread in range(1, more + 1)]
        try:
            work(0)
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


class _Queues:
    """Items that are left, in a queue for each lock. Each thread begins with another queue."""

    def __init__(self, locks: Sequence[int]) -> None:
        queues = dict[int, deque[int]]()
        for i, lock in enumerate(locks):
            queues.setdefault(lock, deque()).append(i)
        self._queues = [*queues.values()]

    def take(self, thread: int) -> int | None:
        """Returns the place of the next item for a thread; None where none is left."""
        for number in range(len(self._queues)):
            with suppress(IndexError):  # another thread may take the last one meanwhile
                return self._queues[(thread + number) % len(self._queues)].popleft()
        return None
