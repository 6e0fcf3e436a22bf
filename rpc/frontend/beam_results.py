"""Reads the results of beam searches: each comes at once, and may have as many tokens as a thousand steps."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rpc.frontend.live import Arrivals, Live
from rpc.frontend.output import StepTokens
from rpc.frontend.pacing import Pacer, Work
from scheduler.events import End


@dataclass(slots=True, eq=False)
class BeamResult:
    """Result of a beam search as it arrived.

    Attributes:
        step: Tokens of the step that ended the search, those of other requests among them.
        indices: Indices of the search's tokens in the step, in order.
        ends: Ends of the search's sequences, which take effect once all tokens are read.
        task: Task that reads the result.
    """

    step: StepTokens
    indices: list[int]
    ends: list[End] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class BeamResultReader:
    """Reads results of beam searches into their streams in short turns, so that no other stream waits for them.

    Args:
        pacer: Shares the loop's time among the results.
        arrived: Called on the loop with the tokens of a result.
        end: Called on the loop with each end of a result that is read.
        unreadable: Called on the loop, in the handler of the exception that a result raised.
    """

    def __init__(
        self,
        pacer: Pacer,
        arrived: Callable[[Arrivals], None],
        end: Callable[[Live, End], None],
        unreadable: Callable[[Live], None],
    ) -> None:
        self._pacer, self._arrived, self._end, self._unreadable = pacer, arrived, end, unreadable
        self._unread: dict[Live, BeamResult] = {}

    def __len__(self) -> int:
        """Count of results that are being read."""
        return len(self._unread)

    def read(self, live: Live, step: StepTokens, indices: list[int], now: float) -> None:
        """Starts a task that reads a result.

        Args:
            live: The beam search, which has no other result that is still being read.
            step: Tokens of the step that ended the search.
            indices: Indices of the search's tokens in the step, in order.
            now: Arrival of the step, on the monotonic clock.
        """
        result = self._unread[live] = BeamResult(step, indices)
        result.task = asyncio.get_running_loop().create_task(self._read(live, result, now))

    def defer_end(self, live: Live, end: End) -> bool:
        """Keeps the end of a sequence until its result is read. Returns False where no result is being read."""
        if live in self._unread:
            self._unread[live].ends.append(end)
        return live in self._unread

    def forget(self, live: Live) -> None:
        """Stops reading the request's result, if it has one."""
        result = self._unread.pop(live, None)
        if result is not None and result.task is not None:
            result.task.cancel()

    async def _read(self, live: Live, result: BeamResult, now: float) -> None:
        try:
            await self._pacer.run(self._accept(live, result, now))
        except Exception:
            self._unread.pop(live, None)
            self._unreadable(live)
            return
        del self._unread[live]
        for end in result.ends:
            self._end(live, end)

    def _accept(self, live: Live, result: BeamResult, now: float) -> Work[None]:
        arrivals = Arrivals(now)
        for i in result.indices:
            sequence = live.stream.sequences[result.step.indices[i]]
            before = sequence.token_count
            live.stream.accept(result.step, i)
            if sequence.token_count > before:
                arrivals.add(live, sequence.index)
            yield
        self._arrived(arrivals)
