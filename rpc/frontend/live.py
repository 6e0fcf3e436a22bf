"""A request that is being served, and what came for all of them with a step."""

import asyncio
from dataclasses import dataclass, field

from rpc.frontend.stream import RequestStream
from rpc.observe.records import Moments
from scheduler.events import Source


@dataclass(slots=True, eq=False)
class Live:
    """A request between its submission and its end. One task reads it; `tell` and `tell_tokens` wake it. last_tokens:
    when the newest one of each sequence came; first_tokens: the first.

    names: of the pages of its prompt. patience: until when it may wait for its start. attempt: the one that is on an
    engine, or was the last of so many submissions. sent: when that one was submitted. served: when an engine first gave
    it a batch row; started_here: the attempt has had one. source: the engine that it is moved from.
    """

    stream: RequestStream
    request_id: str
    started: float
    streaming: bool
    names: list[bytes] = field(default_factory=list)
    patience: float | None = None
    attempt: int = 0
    submissions: int = 0
    sent: float = 0.0
    served: float | None = None
    started_here: bool = False
    source: Source | None = None
    waits: asyncio.TimerHandle | None = None
    """Runs while it waits for an engine, if its patience has an end."""
    first_tokens: dict[int, float] = field(default_factory=dict)
    last_tokens: dict[int, float] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    _news: bool = False
    _wanted: int = 1  # tokens that wake the reader
    _reader: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """There is something to take, or the stream has ended."""
        self._news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def tell_tokens(self) -> None:
        """There are more tokens; a reader who waits for several sleeps on until they are there."""
        if self._wanted == 1 or self.stream.pending_tokens >= self._wanted:
            self.tell()

    def serve(self, age: float, now: float) -> float:
        """Its first batch row was given `age` seconds before `now`, as the engine's clock says.

        That clock may run faster than this one, but no engine serves what was not sent. Returns the seconds that the
        request was queued.
        """
        self.served = max(self.sent, now - age)
        return self.served - self.started

    @property
    def moments(self) -> Moments:
        """What is known so far of when its phases ended, for metrics, logs and traces alike."""
        row = None if self.served is None else self.served - self.started
        first, last = min(self.first_tokens.values(), default=None), max(self.last_tokens.values(), default=None)
        return Moments(
            row, None if first is None else first - self.started, None if last is None else last - self.started
        )

    @property
    def decoding(self) -> tuple[float, float | None] | None:
        """Seconds from its first token to its last, and between two of a sequence on average; None where it has none,
        or what a beam search found, which comes at once.
        """
        if not self.first_tokens or self.stream.request.beam is not None:
            return None
        whole = max(self.last_tokens.values()) - min(self.first_tokens.values())
        gaps = sum(self.stream.sequences[index].new_count - 1 for index in self.first_tokens)
        total = sum(last - self.first_tokens[index] for index, last in self.last_tokens.items())
        return whole, total / gaps if gaps else None

    def stop_waiting(self) -> None:
        """For an engine."""
        if self.waits is not None:
            self.waits.cancel()
            self.waits = None

    async def wait(self, tokens: int = 1, delay: float | None = None) -> None:
        """Until the stream ended or so many tokens wait; no longer than `delay` seconds after the first of them."""
        await self._told()
        if tokens > 1:
            self._wanted = tokens
            try:
                async with asyncio.timeout(delay):
                    while not self.stream.ended and self.stream.pending_tokens < tokens:
                        await self._told()
            except TimeoutError:
                pass  # what there is, is sent
            finally:
                self._wanted = 1
        self._news = False  # a token may have come in the moment in which the delay ran out

    async def _told(self) -> None:
        # An `asyncio.Event` does the same for several readers.
        if not self._news:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._news = False


@dataclass(slots=True, eq=False)
class Arrivals:
    """Tokens that came at the time `now`. firsts: seconds from a request to its first one, gaps: how many of the others
    came so many seconds after the one before in their sequence. prefills: seconds from a batch row to the first one.

    The first tokens of a request's other sequences have neither, nor has what a beam search found, which comes at once.
    """

    now: float
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    gaps: dict[float, int] = field(default_factory=dict)

    def add(self, live: Live, index: int) -> None:
        """One token of this sequence."""
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
