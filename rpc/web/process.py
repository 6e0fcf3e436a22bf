"""The dashboard's HTTP server, in a server's process and on its loop."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from rpc.access.authentication import AuthenticationInterceptor
from rpc.frontend.frontend import Frontend
from rpc.gateway.protocol import bounded_config
from rpc.ports import check_free
from rpc.web.app import make_app
from rpc.web.history import History
from rpc.web.recorded import RecordedRequests

HOST = "127.0.0.1"
READ_SECONDS = 10.0  # for the headers of a request
MOST_CONNECTIONS = 64
DRAIN_SECONDS = 1.0


class _QuietServer(uvicorn.Server):
    """uvicorn's server without signal handlers, which the process has itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DashboardServer:
    """HTTP server of the dashboard. Call `open`, then always `close`.

    Args:
        frontend: The server's frontend.
        authentication: Checks operators' tokens.
        record: File of --record; None where engines record nothing.
    """

    def __init__(
        self, frontend: Frontend, authentication: AuthenticationInterceptor, record: str | None = None
    ) -> None:
        self._history = History(frontend, time.monotonic())
        recorded = None if record is None else RecordedRequests(frontend, Path(record))
        config = bounded_config(
            make_app(frontend, authentication, self._history, recorded),
            read_time=READ_SECONDS,
            write_stall=frontend.settings.write_stall,
            most=MOST_CONNECTIONS,
            drain=DRAIN_SECONDS,
        )
        self._server = _QuietServer(config)
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, port: int) -> str:
        """Opens a port, and returns the dashboard's address.

        Args:
            port: Port on 127.0.0.1; 0 picks a free one.

        Raises:
            OSError: The port cannot be opened.
        """
        check_free("--dashboard-port", HOST, port)
        self._listener = socket.create_server((HOST, port), backlog=128)
        serving = asyncio.create_task(self._server.serve([self._listener]))
        self._tasks = [serving, asyncio.create_task(self._history.follow())]
        while not self._server.started:
            if serving.done():
                serving.result()
                raise OSError(f"--dashboard-port {port}: the HTTP server has ended at once")
            await asyncio.sleep(0.01)
        return f"http://{HOST}:{self._listener.getsockname()[1]}/"

    async def close(self) -> None:
        """Ends the server. Responses that take longer than `DRAIN_SECONDS` are cut off."""
        if not self._tasks:
            return
        serving, following = self._tasks
        following.cancel()
        self._server.should_exit = True
        await asyncio.gather(serving, following, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
