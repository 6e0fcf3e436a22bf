"""uvicorn's HTTP/1.1, with an end to waiting for what a client does not send or does not read."""

import asyncio
import logging
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from rpc.gateway.errors import ApiError, overloaded
from rpc.gateway.settings import LARGEST_HEADERS

# Bytes behind requests, or of bodies whose requests have been refused: who sends less can read why.
MOST_DROPPED = 2**26
LEAST_PACE = 2**12  # bytes a second that a client reads of what waits for it
ALL_READ = (h11.DONE, h11.MUST_CLOSE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]

log = logging.getLogger("quire.gateway")


class BoundedProtocol(H11Protocol):
    """read_time: seconds that the first request on a connection, and the rest of the headers of a begun one, may take,
    and what comes of a body after its answer. write_stall: seconds that a client may read nothing, or less than
    LEAST_PACE, of what waits for it. most: connections at once.

    One request at a time: what comes behind one that is being answered is dropped, and that answer is the connection's
    last. So reading goes on, and who leaves is noticed.

    The state of a request has `cut`, which ends its connection at once.
    """

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: Any = None,
        *,
        read_time: float,
        write_stall: float,
        most: int,
    ) -> None:
        super().__init__(config, server_state, app_state | {"cut": self._cut}, _loop)
        self._read_time, self._write_stall, self._most = read_time, write_stall, most
        self._limit: asyncio.TimerHandle | None = None
        self._dropped = 0
        self._is_last = False
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._refuse(overloaded(f"the gateway has {self._most} connections, all that it takes"))
        else:
            self._limit = self.loop.call_later(self._read_time, self._cut)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state in ALL_READ:
            self._end_after_this()
        if self._is_last:
            self._drop(data)
            return
        super().data_received(data)
        if self.conn.their_state in ALL_READ:
            self.flow.resume_reading()
            if self.conn.trailing_data[0]:
                self._end_after_this()
        answered = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if answered:
            self._drop(data)
        if self.conn.their_state is not h11.IDLE and not answered:
            self._stop()
        elif self._limit is None and not self.transport.is_closing():
            self._limit = self.loop.call_later(self._read_time, self._cut)

    def _end_after_this(self) -> None:
        """The request that is being answered is the last one."""
        if not self._is_last:
            self._is_last, self.cycle.keep_alive = True, False
            self.headers.append(CLOSE_HEADER)  # uvicorn then answers with it

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > MOST_DROPPED:
            self._cut()

    def send_400_response(self, msg: str) -> None:
        del msg
        if len(self.conn.trailing_data[0]) > LARGEST_HEADERS:
            self._refuse(ApiError(431, f"the request's headers have more than {LARGEST_HEADERS} bytes"))
        else:
            self._refuse(ApiError(400, "what came is no request of HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        """The connection ends with it, whatever was asked."""
        self._is_last = True
        self._stop()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._cut()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers = [*error.headers, (b"content-length", str(len(error.body)).encode()), CLOSE_HEADER]
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(error.body)):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def _watch(self) -> None:
        """Nothing more is written until what waits has been read, most of it or, where the connection ends, all."""
        if self._look is None and (waiting := self.transport.get_write_buffer_size()):
            self._look = self.loop.call_later(self._write_stall, self._check_reader, waiting)

    def _check_reader(self, before: int) -> None:
        self._look = None
        waiting = self.transport.get_write_buffer_size()
        if waiting > max(0, before - LEAST_PACE * self._write_stall):
            log.warning("a client at %s read next to nothing for %g s: it is cut off", self.client, self._write_stall)
            self._cut()
        else:
            self._watch()

    def _stop_watching(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._stop_watching()
        super().connection_lost(exc)

    def _stop(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _cut(self) -> None:
        self.transport.abort()


def bounded_config(app: Any, *, read_time: float, write_stall: float, most: int, drain: float) -> uvicorn.Config:
    """A server that speaks HTTP/1.1 alone, within the bounds of `BoundedProtocol`, and writes no log of its own.

    drain: seconds for what is being answered when it ends.
    """

    def protocol(
        config: uvicorn.Config, server_state: Any, app_state: dict[str, Any], _loop: Any = None
    ) -> BoundedProtocol:
        return BoundedProtocol(
            config, server_state, app_state, _loop, read_time=read_time, write_stall=write_stall, most=most
        )

    http: Any = protocol  # uvicorn's types know classes alone
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain)),
        h11_max_incomplete_event_size=LARGEST_HEADERS,
    )
