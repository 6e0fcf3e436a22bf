"""An operator's questions to the engine, and who waits for the answers."""

import asyncio
import itertools
from collections.abc import Iterable

from rpc.frontend.engine_client import EngineClient
from rpc.frontend.errors import RequestFailed
from scheduler.events import Answer, Ask, Question

ANSWER = 10.0  # seconds; an engine answers between two steps


class Questions:
    """To one engine. On the frontend's loop alone."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def ask(self, engine: EngineClient, question: Question) -> Answer:
        """Raises RequestFailed where the engine is dead, dies meanwhile or does not answer in time."""
        if engine.failure is not None:
            raise RequestFailed("UNAVAILABLE", "ENGINE_FAILED", f"the engine is gone: {engine.failure}")
        ticket = next(self._tickets)
        answer = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        engine.send([Ask(ticket, question)])
        try:
            async with asyncio.timeout(ANSWER):
                return await answer
        except TimeoutError:
            message = f"the engine has not answered for {ANSWER:.0f} s; it is in the middle of a step"
            raise RequestFailed("DEADLINE_EXCEEDED", "NO_ANSWER", message) from None
        finally:
            del self._waiting[ticket]

    def take(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            waiting = self._waiting.get(answer.ticket)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def engine_lost(self) -> None:
        """Nobody will answer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RequestFailed("UNAVAILABLE", "ENGINE_FAILED", "the engine is gone"))
