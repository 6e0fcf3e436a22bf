"""The metrics over HTTP, for Prometheus: OpenMetrics 1.0 for a reader that accepts it, else the classic text.

Metric names keep their colon in both. prometheus_client 0.26 alone writes `vllm:x` as `vllm_x` to a Prometheus 2, which
cannot ask for another escaping (client_python#1177), so this app names the escaping itself.

prometheus_client's own server gives each connection a thread without a limit of number or time. This one has both
limits, as any client that reaches the port may connect.
"""

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

MOST_READERS = 16  # connections at once; further ones are closed
SECONDS = 10.0  # longest silence of a reader
LOOK_SECONDS = 0.05  # between looks for the end of the server
OPENMETRICS = "application/openmetrics-text"


class MetricsHandler(WSGIRequestHandler):
    timeout = SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Logs nothing: a scrape is no news."""


class _MetricsServer(ThreadingWSGIServer):
    def __init__(self, *args: Any) -> None:
        self._slots = threading.BoundedSemaphore(MOST_READERS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: a reader that leaves, or is too slow, harms itself alone."""


class _MetricsServerIPv6(_MetricsServer):
    address_family = socket.AF_INET6


def serve_metrics(port: int, registry: CollectorRegistry, host: str = "127.0.0.1") -> WSGIServer:
    """Serves a registry's metrics over HTTP, on threads of their own.

    Args:
        port: TCP port; 0 takes a free one.
        registry: Registry of the metrics.
        host: Address to listen on.

    Raises:
        OSError: The port cannot be opened.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    kind = _MetricsServerIPv6 if family == socket.AF_INET6 else _MetricsServer
    server = make_server(host, port, metrics_app(registry), kind, MetricsHandler)
    # A server that ends waits for the thread's next look: half a second with the library's own interval.
    threading.Thread(target=server.serve_forever, args=(LOOK_SECONDS,), name="quire-metrics", daemon=True).start()
    return server


def metrics_app(registry: CollectorRegistry) -> App:
    """Returns the WSGI application that serves a registry's metrics."""
    app = make_wsgi_app(registry)

    def read(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        kinds = {part.partition(";")[0].strip().lower() for part in environ.get("HTTP_ACCEPT", "").split(",")}
        accepted = f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8" if OPENMETRICS in kinds else ""
        return app({**environ, "HTTP_ACCEPT": accepted}, start)

    return read
