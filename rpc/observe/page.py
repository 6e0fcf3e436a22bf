"""The page that Prometheus reads: its classic text format, whatever it asks for.

OpenMetrics would bring nothing that there is here, and costs names: to a Prometheus 2, which cannot ask for another
escaping, prometheus_client 0.26 then writes vllm:x as vllm_x (client_python#1177). prometheus_client's own server gives
a thread to each connection, for as long as it likes: here both have limits, as anybody who reaches the port may come.
"""

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

MOST_READERS = 16  # at once; who is one too many is hung up on
SECONDS = 10.0  # that a reader may be silent


class _Handler(WSGIRequestHandler):
    timeout = SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Scrapes are no news."""


class _Server(ThreadingWSGIServer):
    def __init__(self, *args: Any) -> None:
        self._places = threading.BoundedSemaphore(MOST_READERS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that leaves, or is too slow, harms itself alone."""


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


def start_page(port: int, registry: CollectorRegistry, host: str = "127.0.0.1") -> WSGIServer:
    """Port 0 is a free one. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    kind = _ServerOfIPv6 if family == socket.AF_INET6 else _Server
    server = make_server(host, port, page_of(registry), kind, _Handler)
    threading.Thread(target=server.serve_forever, name="quire-metrics", daemon=True).start()
    return server


def page_of(registry: CollectorRegistry) -> App:
    """As an application of WSGI."""
    app = make_wsgi_app(registry)

    def read(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return app(environ, start)

    return read
