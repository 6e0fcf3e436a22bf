"""Reads request bodies within limits of size, time and memory, and of the memory that their JSON can become."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json
from starlette.types import Receive

from rpc.gateway.errors import ApiError, overloaded
from rpc.gateway.settings import GatewaySettings

MOST_VALUES = 2**18  # commas and brackets: 0.2 s of the loop and 48 MB for the worst, objects in objects
VALUE_BYTES = 256  # accounted for each of them; objects in objects take 183
FEW_VALUES = 2**10  # up to here an upper bound will do


class ClientGone(Exception):
    """The client has left; no response is possible."""


class Bodies:
    """Memory and calls of all live requests, within the settings' limits. Lives on one asyncio loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._held = self._calls = 0

    @contextmanager
    def held(self) -> Iterator["Body"]:
        """Yields the body of one request, and gives its memory and calls back at the end."""
        body = Body()
        try:
            yield body
        finally:
            self._held -= body.taken
            self._calls -= body.calls

    async def read(self, body: "Body", headers: Mapping[str, str], receive: Receive) -> Any:
        """Reads a body, and returns its JSON value. Raises ApiError, ClientGone."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type is {kind[:60]!r}, must be application/json")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "Content-Encoding is not supported")
        self._check_size(int(length) if (length := headers.get("content-length", "0")).isdigit() else 0)
        try:
            async with asyncio.timeout(self._settings.read_time):
                await self._receive(body, receive)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {self._settings.read_time:g} s") from None
        self._take(body, VALUE_BYTES * value_count(body.data))
        return parsed(body.data)

    def _take(self, body: "Body", size: int) -> None:
        """Accounts `size` more bytes of memory to a body. Raises ApiError."""
        if body.taken + size > self._settings.body_memory:
            most = self._settings.body_memory
            raise ApiError(413, f"the body takes more than {most} bytes, the gateway's --max-live-body-memory")
        if self._held + size > self._settings.body_memory:
            raise overloaded("the bodies of other requests take all memory for bodies")
        body.taken += size
        self._held += size

    async def _receive(self, body: "Body", receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            self._check_size(len(body.data) + len(part))
            self._take(body, len(part))
            body.data += part

    def _check_size(self, size: int) -> None:
        most = self._settings.max_body
        if size > most:
            raise ApiError(413, f"the body has more than {most} bytes, the gateway's --max-body-bytes")

    def admit(self, body: "Body", calls: int) -> None:
        """Admits a request that makes `calls` calls to servers. Raises ApiError."""
        if calls > self._settings.max_prompts:
            raise ApiError(400, f"prompt has {calls} entries: at most {self._settings.max_prompts}", "prompt")
        if self._calls + calls > self._settings.max_calls:
            raise overloaded(f"{self._calls} prompts of other requests are being answered")
        body.calls = calls
        self._calls += calls


class Body:
    """Body of one request.

    Attributes:
        data: Bytes received so far.
        taken: Bytes of memory accounted to it, its JSON value included.
        calls: Number of calls to servers for this request.
    """

    def __init__(self) -> None:
        self.data, self.taken, self.calls = bytearray(), 0, 0


def value_count(data: bytes | bytearray) -> int:
    """Returns an upper bound of the number of JSON values, without parsing. Raises ApiError above `MOST_VALUES`."""
    count = _signs(data)
    if count > FEW_VALUES:  # most may be of texts
        count = _signs(_outside_strings(data))
    if count > MOST_VALUES:
        raise ApiError(400, f"the body has {count} commas and brackets outside its strings: at most {MOST_VALUES}")
    return count


def _outside_strings(data: bytes | bytearray) -> bytes:
    """Returns what stands outside of the strings, in JSON as far as it is right. 4 ns a byte.

    Behind the first 2 * MOST_VALUES quotes all counts as outside, so that the parts of a body of quotes take little.
    """
    # A run of backslashes begins in a string, so its pairs are characters, and a quote behind the rest is one.
    parts = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 2 * MOST_VALUES)
    return b"".join(parts[::2])


def _signs(data: bytes | bytearray) -> int:
    return sum(data.count(sign) for sign in (b",", b"[", b"{"))


def parsed(data: bytes | bytearray) -> Any:
    """Parses JSON without NaN and at most 200 levels deep. Raises ApiError."""
    try:
        return from_json(bytes(data), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
