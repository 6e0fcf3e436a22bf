"""Interface of a protocol's client, and what all of them share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from grpc import aio

from rpc.client.channels import CALLS_A_CONNECTION, CHANNEL_OPTIONS
from rpc.client.security import Security
from rpc.loadgen.corpus import Corpus
from rpc.loadgen.observation import Observation

Prompt = list[int] | str


class Failed(Exception):
    """A request or the whole load failed.

    Attributes:
        code: Short code, for counting.
        message: Text for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


WELL = ("stop", "length", "closed")
CODES = {"": "CUT_OFF", "abort": "ABORTED"}


def check_end(seen: Observation) -> None:
    """Checks that a stream ended well. Raises Failed if the server gave up: its short latency must not count."""
    if seen.finish not in WELL:
        how = "the server ended it" if seen.finish else "it ended, and nothing says why,"
        code = CODES.get(seen.finish, seen.finish.upper())
        raise Failed(code, f"{how} after {seen.tokens} of {seen.asked[1]} tokens")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to send.

    Attributes:
        number: Index in the load, which is also its seed.
        prompt: Token ids or text.
        tokens: Tokens of the prompt, as far as the generator knows.
        output: Tokens to generate.
        at: Seconds after the load's start; 0 without a schedule.
        shared: Tokens at the prompt's front that other requests have too, so that a prefix cache may have them.
    """

    number: int
    prompt: Prompt
    tokens: int
    output: int
    at: float = 0.0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that answers.

    Attributes:
        model: Its name.
        context: Most tokens of prompt and output; None if the server does not report it.
    """

    model: str
    context: int | None = None


class Wire(Protocol):
    """A client of one server. Lives on one asyncio loop."""

    async def find(self) -> ServedModel:
        """Returns the model of the load. Raises Failed."""
        ...

    async def corpus(self, text: str) -> Corpus:
        """Returns this text in units that the protocol can send. Call after `find`. Raises Failed."""
        ...

    async def send(self, request: LoadRequest, seen: Observation) -> None:
        """Sends the request and records in `seen` what comes until its end. Cancelling the task cancels the request.

        Raises:
            Failed: The request ended with an error.
        """
        ...

    async def close(self) -> None: ...


class Connections:
    """Connections to one gRPC server, each with up to `CALLS_A_CONNECTION` calls at once.

    They stay open until the end: opening one takes time, which must not enter the latencies twice.
    """

    def __init__(self, server: str, security: Security) -> None:
        self._server, self._security = server, security
        self._open: list[aio.Channel] = []
        self._calls: list[int] = []

    @contextmanager
    def lease(self) -> Iterator[aio.Channel]:
        """Lends a connection for one call."""
        place = next((i for i, calls in enumerate(self._calls) if calls < CALLS_A_CONNECTION), len(self._calls))
        if place == len(self._open):
            self._open.append(self._security.aio_channel(self._server, CHANNEL_OPTIONS))
            self._calls.append(0)
        self._calls[place] += 1
        try:
            yield self._open[place]
        finally:
            self._calls[place] -= 1

    async def close(self) -> None:
        for channel in self._open:
            await channel.close(None)
