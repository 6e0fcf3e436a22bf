"""uvicorn's HTTP/1.1 protocol with limits of time and size for clients that do not send or do not read."""

import asyncio
import logging
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from rpc.gateway.errors import ApiError, overloaded
from rpc.gateway.settings import LARGEST_HEADERS

# Bytes dropped behind a request, or of a refused request's body. A client that sends less can read the response.
MOST_DROPPED = 2**26
LEAST_PACE = 2**12  # bytes a second of waiting output that a client must read
ALL_READ = (h11.DONE, h11.MUST_CLOSE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]

log = logging.getLogger("quire.gateway")


class BoundedProtocol(H11Protocol):
    """One connection of a client.

    It answers one request at a time, without pipelining: data behind a request that is being answered is dropped, and
    that response is the connection's last. So reading never stops, and the gateway notices a client that leaves.

    The ASGI state of a request has `cut`, which ends its connection at once.

    Args:
        config: uvicorn's configuration.
        server_state: uvicorn's state of the server.
        app_state: ASGI state of the application.
        read_time: Seconds for the first request on a connection, for the rest of begun headers, and for the rest of a
            body after its response.
        write_stall: Seconds that a client may read less than `LEAST_PACE` of waiting output.
        most: Connections at once.
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
        self._stall_check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._refuse(overloaded(f"the gateway has {self._most} connections, its --max-connections"))
        else:
            self._limit = self.loop.call_later(self._read_time, self._cut)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state in ALL_READ:  # data behind a whole request
            self._end_after_this()
        if self._is_last:
            self._drop(data)
            return
        super().data_received(data)
        if self.conn.their_state in ALL_READ:
            self.flow.resume_reading()  # without reading, the end of the connection would go unnoticed
            if self.conn.trailing_data[0]:
                self._end_after_this()
        answered = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if answered:  # the rest of a body that was refused
            self._drop(data)
        if self.conn.their_state is not h11.IDLE and not answered:  # headers are complete; `Bodies` times the body
            self._stop_read_timer()
        elif self._limit is None and not self.transport.is_closing():
            self._limit = self.loop.call_later(self._read_time, self._cut)

    def _end_after_this(self) -> None:
        """Makes the request that is being answered the connection's last."""
        if not self._is_last:
            self._is_last, self.cycle.keep_alive = True, False
            self.headers.append(CLOSE_HEADER)  # uvicorn then sends it with the response

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > MOST_DROPPED:
            self._cut()

    def send_400_response(self, msg: str) -> None:
        del msg
        if len(self.conn.trailing_data[0]) > LARGEST_HEADERS:
            self._refuse(ApiError(431, f"the request's headers have more than {LARGEST_HEADERS} bytes"))
        else:
            self._refuse(ApiError(400, "the bytes received are no request of HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        """Sends an error outside the application, and ends the connection."""
        self._is_last = True
        self._stop_read_timer()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._cut()  # a response has begun: an error cannot follow it
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers = [*error.headers, (b"content-length", str(len(error.body)).encode()), CLOSE_HEADER]
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(error.body)):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        self._watch_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Schedules a check that the client reads waiting output.

        Nothing is written meanwhile: writing goes on when most of the output is read, and at the end of a connection
        there is no more. So the waiting bytes only shrink, by what the client reads.
        """
        if self._stall_check is None and (waiting := self.transport.get_write_buffer_size()):
            self._stall_check = self.loop.call_later(self._write_stall, self._check_reader, waiting)

    def _check_reader(self, before: int) -> None:
        self._stall_check = None
        waiting = self.transport.get_write_buffer_size()
        if waiting > max(0, before - LEAST_PACE * self._write_stall):
            log.warning("a client at %s read next to nothing for %g s: it is cut off", self.client, self._write_stall)
            self._cut()
        else:
            self._watch_reader()

    def _stop_watching_reader(self) -> None:
        if self._stall_check is not None:
            self._stall_check.cancel()
            self._stall_check = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_watching_reader()
        super().connection_lost(exc)

    def _stop_read_timer(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _cut(self) -> None:
        self.transport.abort()


def bounded_config(app: Any, *, read_time: float, write_stall: float, most: int, drain: float) -> uvicorn.Config:
    """Returns uvicorn's configuration for HTTP/1.1 alone over `BoundedProtocol`, without uvicorn's access log.

    Args:
        app: ASGI application.
        read_time: See `BoundedProtocol`.
        write_stall: See `BoundedProtocol`.
        most: See `BoundedProtocol`.
        drain: Seconds that running requests get at the end.
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
