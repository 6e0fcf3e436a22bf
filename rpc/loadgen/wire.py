"""What a load needs of a protocol."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from grpc import aio

from rpc.client.channels import CALLS_A_CONNECTION, CHANNEL_OPTIONS
from rpc.client.security import Security
from rpc.loadgen.corpus import Corpus
from rpc.loadgen.seen import Seen

Prompt = list[int] | str


class Failed(Exception):
    """A request, or the whole load, cannot go on. code: short, for counting."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


WELL = ("stop", "length")
CODES = {"": "CUT_OFF", "abort": "ABORTED"}


def check_end(seen: Seen) -> None:
    """Of a stream that is over: a server that gives up has not served, however soon it did so. Raises Failed."""
    if seen.finish not in WELL:
        how = "the server ended it" if seen.finish else "it ended, and nothing says why,"
        code = CODES.get(seen.finish, seen.finish.upper())
        raise Failed(code, f"{how} after {seen.tokens} of {seen.asked[1]} tokens")


@dataclass(frozen=True, slots=True)
class Request:
    """One to send. at: seconds after the load's start, 0 without a schedule. tokens: of the prompt, as far as the
    generator knows. output: tokens to generate. shared: tokens at the prompt's front that other requests have too, so
    that a prefix cache may have them.
    """

    number: int
    prompt: Prompt
    tokens: int
    output: int
    at: float = 0.0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What answers. context: most tokens of prompt and output, None where the server does not say."""

    model: str
    context: int | None = None


class Wire(Protocol):
    """A client of one server. Lives on one asyncio loop."""

    async def find(self) -> Served:
        """Which model the load is for. Raises Failed."""
        ...

    async def corpus(self, text: str) -> Corpus:
        """Of this text, in units that the protocol can send and the model counts. After `find`. Raises Failed."""
        ...

    async def send(self, request: Request, seen: Seen) -> None:
        """To its end; fills in what comes, `Seen.finish` too. A task that is cancelled cancels the request. Raises
        Failed.
        """
        ...

    async def close(self) -> None: ...


class Connections:
    """To one gRPC server, as many as calls need. None is closed before the end: who opens one waits, and a load has no
    use for doing that twice.
    """

    def __init__(self, server: str, security: Security) -> None:
        self._server, self._security = server, security
        self._open: list[aio.Channel] = []
        self._calls: list[int] = []

    @contextmanager
    def lease(self) -> Iterator[aio.Channel]:
        """For one call."""
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
