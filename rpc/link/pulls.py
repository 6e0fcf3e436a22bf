"""Requests that come from another engine: their KV pages are copied from there, where that is cheaper than computing.

Such a request waits here until its pages have come; then the engine gets both together. Whatever goes wrong, and
whatever does not come in time, is computed: the worst that a pull can do to a stream is to make it wait.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import dropwhile

import grpc
import numpy as np
from grpc import aio
from numpy.typing import NDArray
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from cache_manager.page_names import Name
from rpc.link import CHANNEL_OPTIONS
from rpc.link.arrays import LinkError
from rpc.link.pages import PagePort, joined_names
from rpc.link.proof import Caller, StrangerError
from scheduler.costs import CopyCost, copying_pays
from scheduler.events import SHORT_NAME, Ask, Event, Finish, Question, Source, StepOutputs, Submit

log = logging.getLogger("quire.link")

PULL_SECONDS = 3.0  # that a request waits for its pages at most
AT_ONCE = 2  # pulls: the first requests go on while the next ones' pages come
MOST_HELD = 2**30  # bytes of pages whose requests have not started yet
MOST_BROUGHT = 2**28  # bytes that one of them brings: they are filled in within one step
FORGET_SECONDS = 60.0  # after which the rate of earlier pulls says nothing any more

Wanted = list[list[tuple[Name, bytes]]]
"""By sequence, names of pages in order, and what each is made from beside the name before it."""


@dataclass(slots=True, eq=False)
class Pull:
    """brought: what has come so far, and is right."""

    submit: Submit
    wanted: Wanted
    brought: dict[Name, NDArray[np.uint8]]
    task: asyncio.Task[None] | None = None


class Pulls:
    """Of one engine. here: names of pages that it has, SHORT_NAME bytes of each. send: hands it events. On the link's
    loop alone.
    """

    def __init__(self, port: PagePort, here: Container[bytes], send: Callable[[Sequence[Event]], None]) -> None:
        self._port, self._here, self._send = port, here, send
        self._pulls: dict[int, Pull] = {}
        self._held: dict[int, int] = {}  # bytes by attempt
        self._several: set[int] = set()  # attempts of several sequences
        self._freed = asyncio.Event()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._channels: dict[Source, tuple[aio.Channel, int]] = {}  # and how many use it
        self._cost, self._since, self._came, self._running = CopyCost(), 0.0, 0, 0

    def sift(self, events: Sequence[Event]) -> list[Event]:
        """What the engine is to have now; it gets the other Submits with their pages. A Finish ends a pull."""
        now = list[Event]()
        for event in events:
            if isinstance(event, Submit) and event.source is not None and (wanted := self._wanted(event)):
                pull = self._pulls[event.attempt] = Pull(event, wanted, {})
                pull.task = asyncio.create_task(self._run(pull, event.source))
                if event.request.count > 1:
                    self._several.add(event.attempt)
                continue
            if isinstance(event, Ask) and event.question is Question.RESET_PREFIX_CACHE:
                now += self.give_up()  # what they bring is cached, too
            if isinstance(event, Finish) and (ended := self._pulls.pop(event.attempt, None)) is not None:
                if ended.task is not None:
                    ended.task.cancel()
                self._let_go(event.attempt)
                now.append(ended.submit)
            now.append(event)
        return now

    def take(self, outputs: StepOutputs) -> None:
        """Pages of requests that have started, or ended, are not held any more. Those with several sequences hold them
        to the end: the first that starts is not the last.
        """
        for start in outputs.starts:
            if start.attempt not in self._several:
                self._let_go(start.attempt)
        for attempt in outputs.over:
            self._let_go(attempt)
            self._several.discard(attempt)

    def give_up(self) -> list[Event]:
        """All pulls end; what the engine is to have now."""
        pulls, self._pulls = self._pulls, {}
        for attempt, pull in pulls.items():
            if pull.task is not None:
                pull.task.cancel()
            self._let_go(attempt)
        return [replace(pull.submit, source=None) for pull in pulls.values()]

    def _wanted(self, submit: Submit) -> Wanted:
        """What the engine lacks, of sequences for which copying it pays."""
        form, wanted, asked = self._port.form, Wanted(), set[Name]()
        most = min(MOST_BROUGHT, MOST_HELD) // form.size
        if not self._running and time.monotonic() - self._since > FORGET_SECONDS:
            self._cost = CopyCost()
        for pages in self._port.named(submit):
            lacking = list(dropwhile(lambda page: page[0][:SHORT_NAME] in self._here or page[0] in asked, pages))
            lacking = lacking[: most - len(asked)]
            count = len(lacking)
            if copying_pays(
                count, self._cost.expected(count * form.size), self._port.computing(count * form.page_size)
            ):
                wanted.append(lacking)
                asked.update(name for name, _ in lacking)
        return wanted

    async def _run(self, pull: Pull, source: Source) -> None:
        attempt = pull.submit.attempt
        try:
            async with asyncio.timeout(PULL_SECONDS), self._turns:
                await self._hold(attempt, sum(map(len, pull.wanted)) * self._port.form.size)
                with self._timed():
                    await self._fetch(pull, source)
        except TimeoutError:
            log.warning("not all pages of a request came within %g s: it is computed", PULL_SECONDS)
        except (grpc.RpcError, StrangerError, LinkError) as error:
            log.warning("pages of a request do not come, it is computed: %s", _why(error))
        except Exception:
            log.exception("pages of a request cannot be copied, it is computed")
        del self._pulls[attempt]
        self._send([replace(pull.submit, source=None, brought=pull.brought)])
        if not pull.brought:
            self._let_go(attempt)

    async def _fetch(self, pull: Pull, source: Source) -> None:
        """Raises RpcError, LinkError."""
        async with self._channel_to(source) as channel:
            pages_of = pb_grpc.EngineServiceStub(channel).Pages
            for wanted in pull.wanted:
                due = iter(wanted)
                caller = Caller(source.token)
                request = joined_names([name for name, _ in wanted])
                call = pages_of(iter([request]), metadata=caller.metadata, timeout=PULL_SECONDS)
                await caller.check(call)
                async for response in call:
                    for page, (name, tokens) in zip(response.pages, due, strict=False):
                        pull.brought[name] = self._port.form.decode(page, tokens)
                        self._came += self._port.form.size

    @asynccontextmanager
    async def _channel_to(self, source: Source) -> AsyncIterator[aio.Channel]:
        """One for all pulls from there that run at once."""
        channel, users = self._channels.get(source) or (_open(source.address), 0)
        self._channels[source] = channel, users + 1
        try:
            yield channel
        finally:
            _, users = self._channels.pop(source)
            if users > 1:
                self._channels[source] = channel, users - 1
            else:
                await channel.close(None)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """What comes while any pull runs, in that time, is the rate that is believed."""
        if not self._running:
            self._since, self._came = time.monotonic(), 0
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                now = time.monotonic()
                self._cost.observe(self._came, now - self._since)
                self._since = now

    async def _hold(self, attempt: int, size: int) -> None:
        """Waits until there is room for so many bytes."""
        while self._held and sum(self._held.values()) + size > MOST_HELD:
            self._freed.clear()
            await self._freed.wait()
        self._held[attempt] = size

    def _let_go(self, attempt: int) -> None:
        if self._held.pop(attempt, None) is not None:
            self._freed.set()


def _open(address: str) -> aio.Channel:
    return aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)])


def _why(error: Exception) -> str:
    return f"{error.code().name.lower()}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
