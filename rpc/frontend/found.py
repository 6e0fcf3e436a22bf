"""What beam searches found: it comes at once, and one result may have as many tokens as a thousand steps."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rpc.frontend.live import Arrivals, Live
from rpc.frontend.output import StepTokens
from rpc.frontend.pacing import Pacer, Work
from scheduler.events import End


@dataclass(slots=True, eq=False)
class Found:
    """The result of a search as it arrived.

    Attributes:
        step: Tokens of the step that ended the search, others' among them.
        places: Where those of the search stand in it, in order.
        ends: Of its sequences, which count once all tokens are read.
        task: Reads it.
    """

    step: StepTokens
    places: list[int]
    ends: list[End] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class FoundReader:
    """Reads results of searches into their streams in turns, so that no other stream waits for them."""

    def __init__(
        self,
        pacer: Pacer,
        arrived: Callable[[Arrivals], None],
        ended: Callable[[Live], None],
        unreadable: Callable[[Live], None],
    ) -> None:
        """Args are called on the loop: with the tokens of a result, when its request has ended, and in the handler of
        what a result raised.
        """
        self._pacer, self._arrived, self._ended, self._unreadable = pacer, arrived, ended, unreadable
        self._unread: dict[Live, Found] = {}

    def read(self, live: Live, step: StepTokens, places: list[int], now: float) -> None:
        """Starts to read; the search has no result that is still being read."""
        found = self._unread[live] = Found(step, places)
        found.task = asyncio.get_running_loop().create_task(self._read(live, found, now))

    def keeps(self, live: Live, end: End) -> bool:
        """Whether the end waits for a result that is being read."""
        if live in self._unread:
            self._unread[live].ends.append(end)
        return live in self._unread

    def forget(self, live: Live) -> None:
        """Its result, if it has one, is not wanted any more."""
        found = self._unread.pop(live, None)
        if found is not None and found.task is not None:
            found.task.cancel()

    async def _read(self, live: Live, found: Found, now: float) -> None:
        try:
            await self._pacer.run(self._accept(live, found, now))
            del self._unread[live]
            for end in found.ends:
                live.stream.end(end)
        except Exception:
            self._unread.pop(live, None)
            self._unreadable(live)
            return
        if live.stream.ended:
            self._ended(live)

    def _accept(self, live: Live, found: Found, now: float) -> Work[None]:
        arrivals = Arrivals(now)
        for i in found.places:
            sequence = live.stream.sequences[found.step.indices[i]]
            before = sequence.token_count
            live.stream.accept(found.step, i)
            if sequence.token_count > before:
                arrivals.add(live, sequence.index)
            yield
        self._arrived(arrivals)
