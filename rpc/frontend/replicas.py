"""The engines that a frontend can send requests to: their state, and the choice of one for each request."""

import asyncio
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cache_manager.block_hash import BlockHasher
from rpc.frontend.admin_queries import AdminQueries
from rpc.frontend.engine_client import EngineClient, EngineInfo
from rpc.frontend.errors import RequestFailed
from rpc.frontend.live import Live
from scheduler.events import SHORT_HASH, EngineStats, StepOutputs, short_hashes
from scheduler.limits import Limits
from scheduler.request import Request
from scheduler.routing import ReplicaView, choose, matched_pages


@dataclass(slots=True, eq=False)
class Replica:
    """One launch of an engine in its place. Its successor is another replica with the same number and the next epoch.

    Attributes:
        number: Place among the engines of the model.
        epoch: Number of this launch in its place, from 1.
        client: Client of the engine; None while it starts.
        drained: An operator keeps new requests from it.
        leaving: It is about to end, so no new requests go to it.
        failing: Its outputs have reported its end, which its client may not know yet.
        ended: No engine is to take its place.
        stats: Stats of its last step.
        hashes: Block hashes in its prefix cache, SHORT_HASH bytes each.
        waiting: Tokens of each attempt of this frontend there, by attempt; 0 once the attempt has started.
        isolated_request: Request of this frontend that runs isolated there.
        admin_queries: Operators' questions to it.
        lost: Set once its client reports its failure.
    """

    number: int
    epoch: int = 1
    client: EngineClient | None = None
    drained: bool = False
    leaving: bool = False
    failing: bool = False
    ended: bool = False
    stats: EngineStats = field(default_factory=EngineStats)
    hashes: set[bytes] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)
    isolated_request: Live | None = None
    admin_queries: AdminQueries = field(default_factory=AdminQueries)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    _tokens_waiting: int = 0

    @property
    def identity(self) -> Hashable:
        """Globally unique id of the engine; stable across reconnects of its link."""
        return (self.client.reach if self.client is not None else None) or (self.number, self.epoch)

    @property
    def usable(self) -> bool:
        """Whether it lives."""
        return self.client is not None and self.client.failure is None and not self.failing

    @property
    def open(self) -> bool:
        """Whether it takes requests."""
        return self.usable and not self.drained and not self.leaving

    @property
    def isolated(self) -> bool:
        """Whether a request runs isolated there, this frontend's or another's."""
        return self.isolated_request is not None or self.stats.isolated > 0

    def attempt_sent(self, attempt: int, tokens: int) -> None:
        """Notes that an attempt with this count of tokens was sent to the engine."""
        self.waiting[attempt] = tokens
        self._tokens_waiting += tokens

    def attempt_started(self, attempt: int) -> None:
        """Notes that an attempt has a row, so its tokens wait no more."""
        self._tokens_waiting -= self.waiting.get(attempt, 0)
        if attempt in self.waiting:
            self.waiting[attempt] = 0

    def attempt_ended(self, attempt: int) -> None:
        """Notes that an attempt has ended there, or that its output is no longer wanted."""
        self._tokens_waiting -= self.waiting.pop(attempt, 0)

    def update(self, outputs: StepOutputs) -> None:
        """Takes in the part of a step's outputs that concerns the engine as a whole: stats, KV events, starts, ends."""
        self.stats = outputs.stats
        for change in outputs.kv_events:
            self.hashes.difference_update(short_hashes(change.removed))
            self.hashes.update(short_hashes(change.added))
        for start in outputs.starts:
            self.attempt_started(start.attempt)
        for attempt in outputs.over:
            self.attempt_ended(attempt)

    def view(self, info: EngineInfo, matched: int) -> ReplicaView:
        """Returns the state of the engine as routing sees it.

        Args:
            info: Properties of the engine.
            matched: Pages of a prompt that are in its prefix cache.
        """
        stats = self.stats
        # Stats lack attempts that are on their way to the engine; this frontend's counts lack those of other frontends.
        return ReplicaView(
            waiting_tokens=max(stats.waiting_tokens, self._tokens_waiting),
            running=stats.running,
            free_pages=info.pages - stats.pages_used,
            page_size=info.page_size,
            matched=matched * info.page_size,
        )


class Replicas:
    """The engines of one model, by number. Methods run on the frontend's loop, except where they say otherwise.

    Attributes:
        secret: Key of the engines' block hashes; empty: prompts are not routed by their cached prefixes.
        version: Count of changes: an engine was attached, detached or marked.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self.secret, self._random = secret, random.Random()  # noqa: S311 - it hides nothing
        self.version, self._version_changed = 0, asyncio.Event()
        self._attached: dict[int, Replica] = {}
        self._newest: dict[int, Replica] = {}
        self._hasher: BlockHasher | None = None
        self._info: EngineInfo | None = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._attached.values())

    def new(self, number: int, epoch: int | None = None) -> Replica:
        """Enters an engine that is about to start, as the newest one of its place.

        It inherits the drain of a predecessor that died drained, but not that of one that was leaving.

        Args:
            number: Place of the engine.
            epoch: The engine's epoch as its owner, another server, counts; None: the next one of this place.
        """
        before = self._newest.get(number)
        replica = self._newest[number] = Replica(number, epoch or (before.epoch + 1 if before else 1))
        replica.drained = before is not None and before.drained and not before.leaving
        return replica

    @property
    def newest(self) -> list[Replica]:
        """The newest engine of each place, also one that still starts, by number."""
        return [self._newest[number] for number in sorted(self._newest) if not self._newest[number].ended]

    def get(self, number: int) -> Replica | None:
        return self._attached.get(number)

    def attach(self, replica: Replica) -> None:
        """Attaches an engine, in place of an earlier one with its number."""
        self._attached[replica.number] = replica
        self._info = info = self._common_info()
        routed = len(self._attached) > 1 and self.secret  # with one engine there is no choice, so no hash is computed
        self._hasher = BlockHasher(self.secret, info.numerics, info.page_size) if routed else None
        self._changed()

    def detach(self, number: int) -> None:
        self._attached.pop(number, None)
        if self._attached:
            self._info = self._common_info()
        self._changed()

    def retire(self, number: int) -> None:
        """Takes this place out of `newest` until another engine is entered there."""
        if number in self._newest:
            self._newest[number].ended = True

    def mark(self, replica: Replica, drained: bool, leaving: bool) -> None:
        """Sets whether requests may go to an engine."""
        replica.drained, replica.leaving = drained, leaving
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._version_changed.set()

    async def wait_newer(self, version: int) -> None:
        """Waits until the version differs from this one."""
        while self.version == version:
            self._version_changed.clear()
            await self._version_changed.wait()

    @property
    def attached(self) -> list[Replica]:
        """Engines that are attached at the moment. Read on any thread."""
        return list(self._attached.values())

    def stalled_for(self) -> float:
        """Returns the seconds without progress of the engine that has most of them. Runs on any thread."""
        clients = [replica.client for replica in self.attached]
        return max((client.stalled_for() for client in clients if client is not None), default=0.0)

    @property
    def open(self) -> list[Replica]:
        """Engines that take requests. Read on any thread."""
        return [replica for replica in self.attached if replica.open]

    @property
    def info(self) -> EngineInfo:
        """Properties that all engines have; those of the last one where none is left.

        Raises:
            RequestFailed: No engine was ever attached.
        """
        if self._info is None:
            raise RequestFailed("UNAVAILABLE", "STARTING", "no engine yet", retry_after=1.0)
        return self._info

    def _common_info(self) -> EngineInfo:
        infos = [replica.client.info for replica in self._attached.values() if replica.client is not None]
        return replace(infos[0], limits=_common([info.limits for info in infos]))

    def hashes_of(self, request: Request) -> list[bytes]:
        """Returns the block hashes of the prompt's full pages, SHORT_HASH bytes each; none if routing has no choice.

        Runs on any thread.
        """
        hasher = self._hasher
        if hasher is None:
            return []
        chain = hasher.chain(request.scope)
        chain.extend(request.prompt)
        return [block_hash[:SHORT_HASH] for block_hash in chain.hashes]

    def choose(self, hashes: Sequence[bytes], length: int) -> Replica | None:
        """Chooses the engine for a request. `scheduler.routing` has the rule.

        Args:
            hashes: Block hashes of the prompt's pages, in order.
            length: Count of tokens of the prompt and the output so far.

        Returns:
            The engine; None where no engine takes requests.
        """
        # An engine that runs an isolated request admits no other one until that has ended.
        free = [replica for replica in self.open if not replica.isolated] or self.open
        there = [(replica, replica.client.info) for replica in free if replica.client is not None]
        if not there:
            return None
        matched = [matched_pages(hashes, replica.hashes) for replica, _ in there]

        def view(place: int) -> ReplicaView:
            replica, info = there[place]
            return replica.view(info, matched[place])

        return there[choose(matched, view, length, self._random.randrange)][0]


def _common(limits: Sequence[Limits]) -> Limits:
    """Returns the limits that all engines can serve."""
    return replace(
        limits[0],
        pool_tokens=min(one.pool_tokens for one in limits),
        sequences=min(one.sequences for one in limits),
    )
