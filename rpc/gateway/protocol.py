"""uvicorn's HTTP/1.1, with an end to waiting for what a client does not send or does not read."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_DROPPED = 2**26  # bytes of bodies whose requests have been refused; who sends less can read why


class BoundedProtocol(H11Protocol):
    """read_time: seconds that the first request on a connection, and the rest of the headers of a begun one, may take,
    and what comes of a body after its answer.
    write_stall: seconds that a client has to read its last answer after the connection was to end.

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
    ) -> None:
        super().__init__(config, server_state, app_state | {"cut": self._cut}, _loop)
        self._read_time, self._write_stall = read_time, write_stall
        self._limit: asyncio.TimerHandle | None = None
        self._dropped = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit = self.loop.call_later(self._read_time, self._cut)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answered = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if answered:
            self._dropped += len(data)
            if self._dropped > MOST_DROPPED:
                self._cut()
                return
        if self.conn.their_state is not h11.IDLE and not answered:
            self._stop()
        elif self._limit is None:
            self._limit = self.loop.call_later(self._read_time, self._cut)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_reading()

    def _limit_reading(self) -> None:
        """Of the last answer, after which the connection ends."""
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self._write_stall, self._cut)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _stop(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _cut(self) -> None:
        self.transport.abort()
