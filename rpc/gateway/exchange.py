"""One HTTP request and its response, over ASGI."""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
from starlette.types import Receive, Scope, Send

from rpc.client.failures import failure_of
from rpc.client.security import Metadata
from rpc.gateway.bodies import ClientGone
from rpc.gateway.errors import SERVER, ApiError, of_call
from rpc.gateway.parameters import metadata_of
from rpc.gateway.schema import REQUEST_ID
from rpc.gateway.settings import LARGEST_HEADERS
from rpc.gateway.stats import RequestStats

VISIBLE = re.compile(r"[ -~]+")
MOST_PASSED_ON = 2**12  # bytes of headers; gRPC takes 8 KiB of metadata, its own too

JSON = [(b"content-type", b"application/json")]

log = logging.getLogger("quire.gateway")


class HttpExchange:
    """One HTTP request and its response.

    Attributes:
        headers: Headers of the request by name; the first value of a repeated one.
        request_id: The client's `x-request-id`, or a new one.
        begun: Whether the response's status has been sent.
        receive: ASGI's channel of the request's body.
        stats: Counters for metrics, log and span. `RequestObserver` sets them before a route runs.
    """

    stats: RequestStats

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self.receive, self._send = scope, receive, send
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        self.request_id = self.headers.get("x-request-id") or secrets.token_hex(16)
        self.begun = self._is_last = False

    @property
    def method(self) -> str:
        return str(self._scope["method"])[:20]

    @property
    def path(self) -> str:
        return str(self._scope["path"])

    @property
    def path_parameters(self) -> dict[str, str]:
        return dict(self._scope["path_params"])

    def check(self) -> None:
        """Checks the headers, for every path. Raises ApiError."""
        # With both headers the end of the body is ambiguous (RFC 9112, 6.1): no request may follow on the connection.
        self._is_last = "transfer-encoding" in self.headers and "content-length" in self.headers
        if not re.fullmatch(REQUEST_ID, self.request_id):
            self.request_id = secrets.token_hex(16)
            raise ApiError(400, "x-request-id must be 1 to 96 visible ASCII characters", "x-request-id")
        if self._is_last:
            raise ApiError(400, "Transfer-Encoding and Content-Length do not go together", "content-length")
        size = len(self._scope["raw_path"]) + len(self._scope["query_string"])
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in self._scope["headers"])
        if size > LARGEST_HEADERS:
            raise ApiError(431, f"the request's headers have {size} bytes, at most {LARGEST_HEADERS}")

    def adopt(self, request_id: str) -> None:
        """Takes the request id of the body, unless the headers have one."""
        if "x-request-id" not in self.headers:
            self.request_id = request_id

    def metadata(self) -> Metadata:
        """Returns the metadata of calls to servers. Raises ApiError for headers that gRPC cannot carry."""
        metadata = metadata_of(self.headers)
        for name, value in metadata:
            if not VISIBLE.fullmatch(value):
                raise ApiError(400, f"the header {name} has characters outside ASCII", name)
        if (size := sum(len(name) + len(value) for name, value in metadata)) > MOST_PASSED_ON:
            names = ", ".join(name for name, _ in metadata)
            raise ApiError(431, f"headers for the server ({names}) have {size} bytes, at most {MOST_PASSED_ON}")
        return metadata

    def call_id(self, position: int) -> str:
        """Returns the id of a call for one prompt: unique on the servers, even if clients repeat ids."""
        return f"{self.request_id}.{position}.{secrets.token_hex(4)}"

    async def reply(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Sends a whole response."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*(JSON if headers is None else headers), length])
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Sends an error as the whole response."""
        self.stats.error = error.code or error.kind
        await self.reply(error.status, error.body, error.headers)

    async def begin_events(self) -> None:
        """Begins a response of server-sent events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._start(200, headers)

    async def write(self, data: bytes, more: bool = True) -> None:
        """Sends a part of the response. Waits for a client that does not read, until it is cut off."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def cut(self) -> None:
        """Ends the connection, and drops what waits in it."""
        self._scope["state"]["cut"]()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun, self.stats.status = True, status
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        if self._is_last:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def while_there(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, and cancels it when the client leaves. Call after the body has been read.

        Raises:
            ClientGone: The client left first.
        """
        working, leaving = asyncio.create_task(work), asyncio.create_task(self._gone())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone
            await working
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


@asynccontextmanager
async def failures_to(exchange: HttpExchange) -> AsyncIterator[None]:
    """Turns exceptions into the response, if it has not begun. Texts of unexpected ones go to the log alone."""
    try:
        yield
    except ClientGone:
        exchange.stats.error = "client_left"
    except ApiError as error:
        await exchange.fail(error)
    except grpc.RpcError as error:
        await exchange.fail(of_call(failure_of(error), {}))
    except asyncio.CancelledError:  # the gateway is stopping, and has waited long enough
        log.warning("request %s is cut off", exchange.request_id)
        await _give_up(exchange, ApiError(503, "the gateway is shutting down", kind=SERVER))
    except Exception:
        log.exception("request %s failed in the gateway", exchange.request_id)
        await _give_up(exchange, ApiError(500, "an internal error; the gateway's log has it", kind=SERVER))


async def _give_up(exchange: HttpExchange, error: ApiError) -> None:
    if not exchange.begun:
        await exchange.fail(error)
    else:  # a status was sent: only a broken connection shows that the response is incomplete
        exchange.stats.error = error.kind
        exchange.cut()
        await asyncio.sleep(0)  # lets uvicorn see the end of the connection first
