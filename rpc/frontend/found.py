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
    """

    step: StepTokens
    places: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)


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

    def read(self, live: Live, found: Found, now: float) -> None:
        """Starts a task, `live.reading`; to be cancelled where the result is no longer wanted."""
        live.reading = asyncio.get_running_loop().create_task(self._read(live, found, now))

    async def _read(self, live: Live, found: Found, now: float) -> None:
        try:
            await self._pacer.run(self._accept(live, found, now))
            for end in found.ends:
                live.stream.end(end)
        except Exception:
            live.reading = None  # this task, which ends by itself
            self._unreadable(live)
            return
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
