"""The engines that a frontend can send requests to, what it knows of each, and which of them gets the next one."""

import asyncio
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cache_manager.page_names import PageNamer
from rpc.frontend.engine_client import EngineClient, EngineInfo
from rpc.frontend.errors import RequestFailed
from rpc.frontend.live import Live
from rpc.frontend.questions import Questions
from scheduler.events import SHORT_NAME, EngineStats, StepOutputs, short_names
from scheduler.limits import Limits
from scheduler.request import Request
from scheduler.routing import ReplicaView, choose, matched_pages


@dataclass(slots=True, eq=False)
class Replica:
    """An engine in its place among the others: one that takes the place of a dead one has its number.

    waiting: of each attempt that is there, tokens that it brought; none once it has started. alone: what this frontend
    has there, and nobody beside it. failing: it has told of its end, which its client may not know yet. lost: set once
    that does. epoch: the how-manieth in its place. drained: nothing new goes there; nor where it is leaving, since
    it is to end. ended: none is to take its place.
    """

    number: int
    epoch: int = 1
    client: EngineClient | None = None
    drained: bool = False
    leaving: bool = False
    failing: bool = False
    ended: bool = False
    stats: EngineStats = field(default_factory=EngineStats)
    names: set[bytes] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)
    alone: Live | None = None
    questions: Questions = field(default_factory=Questions)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting_tokens: int = 0

    @property
    def identity(self) -> Hashable:
        """No other engine has it, of another server neither, and it keeps it where a link to it is made anew."""
        return (self.client.reach if self.client is not None else None) or (self.number, self.epoch)

    @property
    def usable(self) -> bool:
        """It lives."""
        return self.client is not None and self.client.failure is None and not self.failing

    @property
    def open(self) -> bool:
        """It takes requests."""
        return self.usable and not self.drained and not self.leaving

    @property
    def isolated(self) -> bool:
        """One request has it for itself, this frontend's or another's."""
        return self.alone is not None or self.stats.isolated > 0

    def send_off(self, attempt: int, tokens: int) -> None:
        """An attempt with so many tokens is on its way."""
        self.waiting[attempt] = tokens
        self._waiting_tokens += tokens

    def started(self, attempt: int) -> None:
        self._waiting_tokens -= self.waiting.get(attempt, 0)
        if attempt in self.waiting:
            self.waiting[attempt] = 0

    def left(self, attempt: int) -> None:
        """It has ended there, or nobody wants more of it."""
        self._waiting_tokens -= self.waiting.pop(attempt, 0)

    def take(self, outputs: StepOutputs) -> None:
        """What a step tells of the engine as a whole."""
        self.stats = outputs.stats
        for change in outputs.names:
            self.names.difference_update(short_names(change.removed))
            self.names.update(short_names(change.added))
        for start in outputs.starts:
            self.started(start.attempt)
        for attempt in outputs.over:
            self.left(attempt)

    def view(self, info: EngineInfo, names: Sequence[bytes]) -> ReplicaView:
        """names: of a prompt's pages."""
        stats = self.stats
        return ReplicaView(
            waiting_tokens=max(stats.waiting_tokens, self._waiting_tokens),
            running=stats.running,
            free_pages=info.pages - stats.pages_used,
            page_size=info.page_size,
            matched=matched_pages(names, self.names) * info.page_size,
        )


class Replicas:
    """By number. secret: what the engines make names of pages with. version: goes up when one comes, goes or is marked.
    On the frontend's loop, but for `names_of`.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self.secret, self._random = secret, random.Random()  # noqa: S311 - it hides nothing
        self.version, self._news = 0, asyncio.Event()
        self._attached: dict[int, Replica] = {}
        self._newest: dict[int, Replica] = {}
        self._namer: PageNamer | None = None
        self._info: EngineInfo | None = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._attached.values())

    def new(self, number: int, epoch: int | None = None) -> Replica:
        """For an engine that is about to start. One that had the place before counts no more; where that was drained
        and died, this one is drained too. epoch: where another server counts them.
        """
        before = self._newest.get(number)
        replica = self._newest[number] = Replica(number, epoch or (before.epoch + 1 if before else 1))
        replica.drained = before is not None and before.drained and not before.leaving
        return replica

    @property
    def newest(self) -> list[Replica]:
        """The one in each place, also one that is only starting."""
        return [self._newest[number] for number in sorted(self._newest) if not self._newest[number].ended]

    def get(self, number: int) -> Replica | None:
        return self._attached.get(number)

    def attach(self, replica: Replica) -> None:
        """In the place of the one with its number."""
        self._attached[replica.number] = replica
        self._info = info = self._common_info()
        routed = len(self._attached) > 1 and self.secret
        self._namer = PageNamer(self.secret, info.numerics, info.page_size) if routed else None
        self._changed()

    def detach(self, number: int) -> None:
        self._attached.pop(number, None)
        if self._attached:
            self._info = self._common_info()
        self._changed()

    def retire(self, number: int) -> None:
        """There is to be no engine in this place for now."""
        if number in self._newest:
            self._newest[number].ended = True

    def mark(self, replica: Replica, drained: bool, leaving: bool) -> None:
        """Whether requests may go there."""
        replica.drained, replica.leaving = drained, leaving
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._news.set()

    async def newer(self, version: int) -> None:
        """Until the version is another one."""
        while self.version == version:
            self._news.clear()
            await self._news.wait()

    @property
    def attached(self) -> list[Replica]:
        """As they are at the moment. On any thread."""
        return list(self._attached.values())

    @property
    def open(self) -> list[Replica]:
        """Those that take requests. On any thread."""
        return [replica for replica in self.attached if replica.open]

    @property
    def info(self) -> EngineInfo:
        """What is true of all of them, or was of the last one. Raises RequestFailed where there never was one."""
        if self._info is None:
            raise RequestFailed("UNAVAILABLE", "STARTING", "no engine yet", retry_after=1.0)
        return self._info

    def _common_info(self) -> EngineInfo:
        infos = [replica.client.info for replica in self._attached.values() if replica.client is not None]
        return replace(infos[0], limits=_common([info.limits for info in infos]))

    def names_of(self, request: Request) -> list[bytes]:
        """Of the full pages of its prompt, where there are several replicas to choose from. On any thread."""
        namer = self._namer
        if namer is None:
            return []
        chain = namer.chain(request.scope)
        chain.extend(request.prompt)
        return [name[:SHORT_NAME] for name in chain.names]

    def choose(self, names: Sequence[bytes], length: int) -> Replica | None:
        """For a prompt of this length with these names of pages; None where no engine takes any."""
        free = [replica for replica in self.open if not replica.isolated] or self.open
        views = [replica.view(replica.client.info, names) for replica in free if replica.client is not None]
        return free[choose(views, length, self._random.randrange)] if views else None


def _common(limits: Sequence[Limits]) -> Limits:
    """What all of them can serve."""
    return replace(
        limits[0],
        pool_tokens=min(one.pool_tokens for one in limits),
        sequences=min(one.sequences for one in limits),
    )
