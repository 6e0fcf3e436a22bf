"""Sends requests when they are due, and never later because the server is slow.

An open loop sends requests at times that do not depend on responses. Latencies count from these times, not from when
the generator sent the request. So a stall of the server counts for all requests that come meanwhile; otherwise the
slowest moments would be measured least (coordinated omission, Tene, 2013).

A closed loop sends the next request when one ends, so a slow server gets fewer. Its latencies hold for that number of
requests at a time, and not for a service whose users come when they like.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from rpc.loadgen.machine import Effort, EffortMeter
from rpc.loadgen.observation import INTERRUPTED, Observation
from rpc.loadgen.wire import Failed, LoadRequest, check_end

Send = Callable[[LoadRequest, Observation], Awaitable[None]]
LEAD = 0.05  # seconds until the first request, so that none is late to begin with


@dataclass(slots=True)
class LoadRun:
    """Progress and result of a load.

    Attributes:
        scheduled: Whether requests have times of their own (open loop).
        seen: Observations of all requests sent.
        begin: Start, in seconds of time.monotonic.
        end: End of the last request, in seconds of time.monotonic.
        effort: Measurements of the generator itself.
        stopped: Whether a person stopped the load before its end.
        ended: Number of `seen` that have ended.
        failed: Number of `seen` that have failed.
        tokens: Number of output tokens of those that have ended.
        warm_up: Observations of the warm-up, which do not count.
        exact: Whether prompts have exactly the requested number of tokens.
    """

    scheduled: bool
    seen: list[Observation] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    effort: Effort = field(default_factory=Effort)
    stopped: bool = False
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    warm_up: list[Observation] = field(default_factory=list)
    exact: bool = True


class Drive:
    """Runs one load. Lives on one asyncio loop.

    Args:
        send: Sends one request and records its observation.
        timeout: Seconds for a request.
        scheduled: Whether requests have times of their own (open loop).

    Attributes:
        run: Progress and result, kept up to date.
    """

    def __init__(self, send: Send, timeout: float, scheduled: bool) -> None:
        self._send, self._timeout = send, timeout
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._over = asyncio.Event()
        self.run = LoadRun(scheduled)

    async def run_closed(self, requests: Iterator[LoadRequest], together: int, seconds: float | None = None) -> LoadRun:
        """Sends `together` requests at a time, the next one when one ends; none after `seconds`."""
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

    async def run_open(self, requests: Iterator[LoadRequest], seconds: float | None = None) -> LoadRun:
        """Sends each request at its time, however many are running; none that is due after `seconds`."""
        begin = self.run.begin = time.monotonic() + LEAD

        async def in_time() -> None:
            for request in requests:  # the prompt is made before its time, so that making it delays no request
                if seconds is not None and request.at >= seconds:
                    return
                due = begin + request.at
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._start(self._one(request, due))

        self._start(in_time())
        return await self._finish()

    def stop(self) -> None:
        """Stops sending, and cancels running requests."""
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

    async def _finish(self) -> LoadRun:
        """Waits for the end of all requests. Raises errors that are not a request's own, such as a bug."""
        async with EffortMeter() as self.run.effort:
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

    async def _one(self, request: LoadRequest, due: float | None) -> None:
        seen = Observation(
            time.monotonic() if due is None else due, (request.tokens, request.output), shared=request.shared
        )
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
