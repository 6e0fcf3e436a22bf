"""An event of gRPC for a loop that was closed harms no loop that runs."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from tests.support.event_loop import TestLoop
from tests.support.links import eventually

METHOD = "/quire.Late/Answer"


class CountingLoop(TestLoop):
    """Counts the calls that reach it after its end."""

    late = 0

    def call_soon_threadsafe(self, *args: Any, **named: Any) -> asyncio.Handle:
        self.late += self.is_closed()
        return super().call_soon_threadsafe(*args, **named)


@dataclass
class LateServer:
    """A server whose one method answers once `answer` is set.

    Attributes:
        address: Address of the server.
        called: Set once a call has arrived.
        answer: Lets it answer.
    """

    address: str
    called: threading.Event = field(default_factory=threading.Event)
    answer: threading.Event = field(default_factory=threading.Event)

    def method(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        self.called.set()
        self.answer.wait()
        return request


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LateServer]:
    late = LateServer(f"unix:{tmp_path / 's'}")
    with ThreadPoolExecutor(1) as threads:
        running = grpc.server(threads)
        handler = grpc.unary_unary_rpc_method_handler(late.method)
        running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("quire.Late", {"Answer": handler}),))
        running.add_insecure_port(late.address)
        running.start()
        yield late
        late.answer.set()
        running.stop(None).wait()


def errors_of_another_loop(
    closed: asyncio.AbstractEventLoop, server: LateServer, over: Callable[[list[str]], object]
) -> list[str]:
    """Closes a loop while a call of it waits for its answer, which arrives while another loop runs.

    Args:
        closed: The loop that is closed.
        server: Server of the call.
        over: Tells from the errors so far whether the answer has arrived.

    Returns:
        Errors of the other loop's callbacks.
    """

    async def call() -> aio.UnaryUnaryCall:
        made = aio.insecure_channel(server.address).unary_unary(METHOD)(b"")
        await asyncio.to_thread(server.called.wait)
        return made

    pending = closed.run_until_complete(call())
    closed.close()
    errors: list[str] = []

    async def answered() -> None:
        async with aio.insecure_channel(server.address):  # so that this loop reads gRPC's events
            server.answer.set()
            await eventually(lambda: over(errors))

    running = TestLoop()
    running.set_exception_handler(lambda _, context: errors.append(str(context.get("exception"))))
    running.run_until_complete(answered())
    running.close()
    assert not pending.done()
    return errors


def test_a_late_event_reaches_no_other_loop(server: LateServer) -> None:
    closed = CountingLoop()
    assert errors_of_another_loop(closed, server, lambda _: closed.late) == []


def test_a_loop_of_asyncio_lets_it_reach_another(server: LateServer) -> None:
    """Once this fails, grpcio has changed, and `TestLoop` is not needed any more."""
    assert set(errors_of_another_loop(asyncio.SelectorEventLoop(), server, len)) == {"Event loop is closed"}


def test_other_late_calls_raise() -> None:
    loop = TestLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        loop.call_soon_threadsafe(print)
