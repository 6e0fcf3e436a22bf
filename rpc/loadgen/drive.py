"""Sends requests when they are due, and never later because the server is slow.

An open loop's requests have times that do not depend on answers, and their latencies count from these times, not from
when the generator came to send them: a server that stalls delays none of the requests that would have come meanwhile,
and all that they waited counts (else the slowest moments would be measured least: coordinated omission, Tene, 2013). A
closed loop sends the next request as one ends, so a slow server is asked less: its latencies say how long requests take
with so many at a time, and nothing about a service that people come to when they like.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from rpc.loadgen.machine import Effort, Watch
from rpc.loadgen.seen import INTERRUPTED, Seen
from rpc.loadgen.wire import Failed, Request, check_end

Send = Callable[[Request, Seen], Awaitable[None]]
LEAD = 0.05  # seconds until the first request, so that none is late to begin with


@dataclass(slots=True)
class Run:
    """What came of a load. begin, end: seconds of time.monotonic. stopped: by the person, before its end. ended,
    failed: how many of `seen` have by now. tokens: of those that have ended. warm_up: requests before it, which do not
    count. exact: prompts have as many tokens as they should.
    """

    scheduled: bool
    seen: list[Seen] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    effort: Effort = field(default_factory=Effort)
    stopped: bool = False
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    warm_up: list[Seen] = field(default_factory=list)
    exact: bool = True


class Drive:
    """One load. timeout: seconds for a request. `run` is filled as it goes."""

    def __init__(self, send: Send, timeout: float, scheduled: bool) -> None:
        self._send, self._timeout = send, timeout
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._over = asyncio.Event()
        self.run = Run(scheduled)

    async def closed(self, requests: Iterator[Request], together: int, seconds: float | None = None) -> Run:
        """So many at a time, each sent as one before it ends; none after `seconds`."""
        self.run.begin = time.monotonic()
        last = self.run.begin + seconds if seconds is not None else float("inf")

        async def one_by_one() -> None:
            for request in requests:
                if time.monotonic() >= last:
                    return
                await self._one(request, None)

        for _ in range(together):
            self._start(one_by_one())
        return await self._finish()

    async def open(self, requests: Iterator[Request], seconds: float | None = None) -> Run:
        """Each at its time, however many there are by then; none that comes after `seconds`."""
        begin = self.run.begin = time.monotonic() + LEAD

        async def in_time() -> None:
            for request in requests:  # made before its time, not in it
                if seconds is not None and request.at >= seconds:
                    return
                due = begin + request.at
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._start(self._one(request, due))

        self._start(in_time())
        return await self._finish()

    def stop(self) -> None:
        """No more is sent, and what runs is cancelled."""
        self.run.stopped = True
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        if not self._tasks or self._failure is not None:
            self._over.set()

    async def _finish(self) -> Run:
        """Raises what is nobody's request's fault."""
        async with Watch() as self.run.effort:
            try:
                await self._over.wait()
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        self.run.end = time.monotonic()
        if self._failure is not None:
            raise self._failure
        return self.run

    async def _one(self, request: Request, due: float | None) -> None:
        seen = Seen(time.monotonic() if due is None else due, (request.tokens, request.output), shared=request.shared)
        self.run.seen.append(seen)
        try:
            async with asyncio.timeout(self._timeout):
                await self._send(request, seen)
            check_end(seen)
        except Failed as failed:
            seen.code, seen.message = failed.code, failed.message
        except TimeoutError:
            seen.code, seen.message = "TIMEOUT", f"no end after {self._timeout:g} s"
        except asyncio.CancelledError:
            seen.code = INTERRUPTED
            raise
        finally:
            seen.ended = time.monotonic()
            self.run.ended += 1
            self.run.failed += seen.code not in ("", INTERRUPTED)
            self.run.tokens += seen.tokens
