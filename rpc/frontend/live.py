"""A request that is being served, and what came for all of them with a step."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from rpc.frontend.stream import RequestStream


@dataclass(slots=True, eq=False)
class Live:
    """A request between its submission and its end. One task reads it. last_tokens: when the newest one of each
    sequence came.
    """

    stream: RequestStream
    request_id: str
    started: float
    streaming: bool
    news: asyncio.Event = field(default_factory=asyncio.Event)
    last_tokens: dict[int, float] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None

    async def wait(self, tokens: int = 1, delay: float | None = None) -> None:
        """Until the stream ended or so many tokens wait; no longer than `delay` seconds after the first of them."""
        await self.news.wait()
        if tokens > 1:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    while not self.stream.ended and self.stream.pending_tokens < tokens:
                        self.news.clear()
                        await self.news.wait()
        self.news.clear()


@dataclass(slots=True, eq=False)
class Arrivals:
    """Tokens that came at the time `now`. firsts: seconds from a request to its first one, gaps: how many of the others
    came so many seconds after the one before in their sequence.

    The first tokens of a request's other sequences have neither, nor has what a beam search found, which comes at once.
    """

    now: float
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: dict[float, int] = field(default_factory=dict)

    def add(self, live: Live, index: int) -> None:
        """One token of this sequence."""
        self.tokens += 1
        last = live.last_tokens.get(index)
        if last is None:
            if not live.last_tokens:
                self.firsts.append(self.now - live.started)
        elif live.stream.request.beam is None:
            gap = self.now - last
            self.gaps[gap] = self.gaps.get(gap, 0) + 1
        live.last_tokens[index] = self.now
