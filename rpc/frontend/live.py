"""A request that is being served, and the times of the tokens that a step brings."""

import asyncio
import math
from dataclasses import dataclass, field

from rpc.frontend.stream import RequestStream
from rpc.observe.records import Moments
from scheduler.events import KVSource


@dataclass(slots=True, eq=False)
class Live:
    """A request between its submission and its end.

    One task reads it; `wake` and `wake_for_tokens` wake that task. Times are seconds on the monotonic clock.

    Attributes:
        stream: Output of the request.
        request_id: Id of the request, unique among its tenant's live ones.
        started: Arrival of the request.
        streaming: Its client takes output as it comes.
        hashes: Block hashes of the prompt's pages, by which it is routed; empty where routing does not need them.
        queue_timeout: Time at which it fails if it has not been admitted; None: it waits on.
        deadline: Time from which on nobody waits for its output.
        attempt: The attempt that is on an engine, or the last one that was; 0 before the first.
        submissions: Count of attempts.
        sent: Time of the last submission to an engine.
        served: Time at which an engine first gave it a row; None before.
        started_here: The current attempt has had a row.
        source: Engine that it moves from, whose KV pages the next engine can copy.
        queue_timer: Ends its wait for an engine; None while it is on one, or waits without a limit.
        failover_timer: Ends its wait while there is no engine; None while it is on one, or waits for its turn.
        first_tokens: Time of the first token of each sequence, by index.
        last_tokens: Time of the newest token of each sequence, by index.
        deadline_timer: Ends it at its deadline.
    """

    stream: RequestStream
    request_id: str
    started: float
    streaming: bool
    hashes: list[bytes] = field(default_factory=list)
    queue_timeout: float | None = None
    deadline: float = math.inf
    attempt: int = 0
    submissions: int = 0
    sent: float = 0.0
    served: float | None = None
    started_here: bool = False
    source: KVSource | None = None
    queue_timer: asyncio.TimerHandle | None = None
    failover_timer: asyncio.TimerHandle | None = None
    first_tokens: dict[int, float] = field(default_factory=dict)
    last_tokens: dict[int, float] = field(default_factory=dict)
    deadline_timer: asyncio.TimerHandle | None = None
    _news: bool = False
    _wanted: int = 1  # count of tokens that wakes the reader
    _reader: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wakes the reader: the stream has new output, or has ended."""
        self._news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def wake_for_tokens(self) -> None:
        """Wakes the reader for new tokens, but only once as many wait as it asked for."""
        if self._wanted == 1 or self.stream.pending_tokens >= self._wanted:
            self.wake()

    def serve(self, age: float, now: float) -> float:
        """Notes that an engine admitted the request.

        The engine's clock may run faster than this one, but no engine admits a request before it was sent.

        Args:
            age: Seconds since the admission on the engine's clock.
            now: Time on this process's clock.

        Returns:
            Seconds that the request was queued.
        """
        self.served = max(self.sent, now - age)
        return self.served - self.started

    @property
    def moments(self) -> Moments:
        """Ends of the request's phases so far, for metrics, logs and traces alike."""
        row = None if self.served is None else self.served - self.started
        first, last = min(self.first_tokens.values(), default=None), max(self.last_tokens.values(), default=None)
        return Moments(
            row, None if first is None else first - self.started, None if last is None else last - self.started
        )

    @property
    def decoding(self) -> tuple[float, float | None] | None:
        """Seconds from the first token to the last, and mean seconds between two tokens of a sequence.

        None where the request has no token, or is a beam search, whose tokens come at once. The mean is None where no
        sequence has two tokens.
        """
        if not self.first_tokens or self.stream.request.beam is not None:
            return None
        whole = max(self.last_tokens.values()) - min(self.first_tokens.values())
        gaps = sum(self.stream.sequences[index].new_count - 1 for index in self.first_tokens)
        total = sum(last - self.first_tokens[index] for index, last in self.last_tokens.items())
        return whole, total / gaps if gaps else None

    def stop_queue_timer(self) -> None:
        """Cancels the end of the wait for an engine."""
        if self.queue_timer is not None:
            self.queue_timer.cancel()
            self.queue_timer = None

    def stop_failover_timer(self) -> None:
        """Cancels the end of the wait while there is no engine."""
        if self.failover_timer is not None:
            self.failover_timer.cancel()
            self.failover_timer = None

    async def wait(self, tokens: int = 1, delay: float | None = None) -> None:
        """Waits until the stream has ended or tokens wait to be taken.

        Args:
            tokens: Count of tokens to wait for.
            delay: Seconds after the first token at which fewer tokens are enough; None: no limit.
        """
        await self._wait_for_news()
        if tokens > 1:
            self._wanted = tokens
            try:
                async with asyncio.timeout(delay):
                    while not self.stream.ended and self.stream.pending_tokens < tokens:
                        await self._wait_for_news()
            except TimeoutError:
                pass  # the delay is over, so fewer tokens are sent
            finally:
                self._wanted = 1
        self._news = False  # a token may have come in the moment in which the delay ran out

    async def _wait_for_news(self) -> None:
        # One future is enough for one reader; an `asyncio.Event` would serve several.
        if not self._news:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._news = False


@dataclass(slots=True, eq=False)
class Arrivals:
    """Tokens that came with one step, and their times.

    The first token of a request's second sequence and of further ones has neither a first-token time nor a gap. Tokens
    of a beam search have no gaps, since they come at once.

    Attributes:
        now: Arrival of the step, seconds on the monotonic clock.
        tokens: Count of tokens.
        firsts: Seconds from each request's arrival to its first token.
        prefills: Seconds from each request's admission to its first token.
        gaps: Count of tokens by the seconds since the token before in their sequence.
    """

    now: float
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    gaps: dict[float, int] = field(default_factory=dict)

    def add(self, live: Live, index: int) -> None:
        """Adds a token of the sequence `index`."""
        self.tokens += 1
        last = live.last_tokens.get(index)
        if last is None:
            if not live.last_tokens:
                self.firsts.append(self.now - live.started)
                if live.served is not None:
                    self.prefills.append(self.now - live.served)
            live.first_tokens[index] = self.now
        elif live.stream.request.beam is None:
            gap = self.now - last
            self.gaps[gap] = self.gaps.get(gap, 0) + 1
        live.last_tokens[index] = self.now
