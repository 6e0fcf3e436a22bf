"""An operator's questions to an engine, and the tasks that wait for their answers."""

import asyncio
import itertools
from collections.abc import Iterable

from rpc.frontend.engine_client import EngineClient
from rpc.frontend.errors import RequestFailed
from scheduler.events import AdminAnswer, AdminQuery, AdminQuestion

ANSWER_SECONDS = 10.0  # an engine answers between two steps


class AdminQueries:
    """Asks one engine, and matches its answers to the questions by ticket. Runs on the frontend's loop alone."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AdminAnswer]] = {}

    async def ask(self, engine: EngineClient, question: AdminQuestion) -> AdminAnswer:
        """Returns the engine's answer.

        Raises:
            RequestFailed: The engine is dead, dies meanwhile or does not answer in time.
        """
        if engine.failure is not None:
            raise RequestFailed("UNAVAILABLE", "ENGINE_FAILED", f"the engine is gone: {engine.failure}")
        ticket = next(self._tickets)
        answer = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        engine.send([AdminQuery(ticket, question)])
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            message = f"the engine has not answered for {ANSWER_SECONDS:.0f} s; it is in the middle of a step"
            raise RequestFailed("DEADLINE_EXCEEDED", "NO_ANSWER", message) from None
        finally:
            del self._waiting[ticket]

    def resolve(self, answers: Iterable[AdminAnswer]) -> None:
        """Hands answers to the tasks that wait for them; one that came too late is dropped."""
        for answer in answers:
            waiting = self._waiting.get(answer.ticket)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def engine_lost(self) -> None:
        """Fails all questions without an answer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RequestFailed("UNAVAILABLE", "ENGINE_FAILED", "the engine is gone"))
