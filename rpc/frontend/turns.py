"""Threads that tenants use in turn."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class TurnExecutor:
    """Runs calls in threads. Tenants take turns, and calls of one tenant run in the order in which they come.

    So the first call of a tenant waits for the calls that run and for at most one more of each other tenant, however
    many of theirs wait. All methods run on one loop.

    Args:
        threads: Count of threads.
        name: Prefix of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the one whose turn is next first

    async def run(self, call: Callable[[], T], tenant: str) -> T:
        """Runs a call in the tenant's turn, and returns its result.

        Raises:
            CancelledError: The executor was shut down before the call ran, or this task was cancelled. A call that runs
                already keeps its thread to its end.
            Exception: Any exception of the call.
        """
        await self._turn(tenant)
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:  # in the thread, and not before it is free: `wrap_future` is cancelled at once
            with suppress(RuntimeError):  # the loop is closed, so no call waits
                loop.call_soon_threadsafe(self._release)

        try:
            running = self._executor.submit(call)
        except RuntimeError:  # it is shut down
            self._release()
            raise asyncio.CancelledError from None
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def shutdown(self) -> None:
        """Cancels the calls that wait, and does not wait for those that run."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for turns in self._waiting.values():
            for turn in turns:
                turn.cancel()

    async def _turn(self, tenant: str) -> None:
        """Waits until the tenant may use a free thread, and takes it."""
        if self._free:  # no call waits while a thread is free
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._drop(tenant, turn)
            else:  # it was given the thread in the same moment
                self._release()
            raise

    def _release(self) -> None:
        """Gives a thread that is free to the next tenant's first call."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _drop(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]
