"""Has the questions of live requests' outputs answered, beside the event loop."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from rpc.frontend.completeness import Question
from rpc.frontend.errors import RequestFailed
from rpc.frontend.live import Arrivals, Live
from rpc.frontend.turns import TurnExecutor

END_SECONDS = 5.0  # that the end of an output waits for whether it was closed in time


class EndQuestions:
    """Answers the open questions of sequences, one after the other: one process answers them all.

    Tenants have their questions answered in turn, so that one of them delays another's question by one answer beside
    the one that is being answered, however many it asks.

    A sequence keeps what comes meanwhile, and reads it behind the answer.

    Args:
        arrived: Called on the loop with the tokens that a sequence has read behind an answer.
        stopped: Called on the loop when a stop string has ended a sequence.
        went_on: Called on the loop when a sequence has got another answer, with which it may have ended too.
        failed: Called on the loop when a question about a stop string cannot be answered.
        unreadable: Called on the loop, in the handler of the exception that a sequence raised.
    """

    def __init__(
        self,
        arrived: Callable[[Arrivals], None],
        stopped: Callable[[Live, int], None],
        went_on: Callable[[Live], None],
        failed: Callable[[Live, RequestFailed], None],
        unreadable: Callable[[Live], None],
    ) -> None:
        self._arrived, self._stopped, self._went_on = arrived, stopped, went_on
        self._failed, self._unreadable = failed, unreadable
        self._thread = TurnExecutor(1, "quire-ends")
        self._tasks: dict[Live, dict[int, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        """Count of requests with an open question."""
        return len(self._tasks)

    def ask(self, live: Live, index: int) -> None:
        """Has the open question of a sequence answered, and those that follow from the answer."""
        tasks = self._tasks.setdefault(live, {})
        if index not in tasks:
            tasks[index] = asyncio.get_running_loop().create_task(self._answer_all(live, index))

    def forget(self, live: Live) -> None:
        """Drops the questions of a request."""
        for task in self._tasks.pop(live, {}).values():
            if task is not asyncio.current_task():
                task.cancel()

    def close(self) -> None:
        """Cancels the questions that wait, and does not wait for one that is being answered."""
        self._thread.shutdown()

    async def _answer_all(self, live: Live, index: int) -> None:
        sequence, stopped = live.stream.sequences[index], False
        try:
            while (question := sequence.question) is not None:
                complete = await self._is_complete(live, question)
                if live.stream.ended or sequence.question is not question:
                    self._done(live, index)
                    return  # it has ended otherwise
                before, arrivals = sequence.token_count, Arrivals(time.monotonic())
                stopped = sequence.answer(complete)
                for _ in range(sequence.token_count - before):
                    arrivals.add(live, index)
                self._arrived(arrivals)
                if not stopped and sequence.question is not None:
                    self._went_on(live)  # the last answer has its own
        except RequestFailed as failure:
            self._done(live, index)
            self._failed(live, failure)
            return
        except Exception:
            self._done(live, index)
            self._unreadable(live)
            return
        self._done(live, index)
        if stopped:
            self._stopped(live, index)
        else:
            self._went_on(live)

    async def _is_complete(self, live: Live, question: Question) -> bool:
        """Answers a question, and says no where one about an end cannot be answered, or not within `END_SECONDS`.

        Raises:
            RequestFailed: One about a stop string cannot be answered.
        """
        answer = self._thread.run(partial(live.stream.is_complete, question), live.stream.spec.tenant)
        try:
            return await asyncio.wait_for(answer, None if question.of_stop else END_SECONDS)
        except TimeoutError:  # the questions of others come first: the output is there, and only its reason waits
            return False
        except RequestFailed:
            if question.of_stop:
                raise
            return False

    def _done(self, live: Live, index: int) -> None:
        tasks = self._tasks.get(live, {})
        tasks.pop(index, None)
        if not tasks:
            self._tasks.pop(live, None)
