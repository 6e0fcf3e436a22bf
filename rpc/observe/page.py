"""The page that Prometheus reads: its classic text format, whatever it asks for.

OpenMetrics would bring nothing that there is here, and costs names: to a Prometheus 2, which cannot ask for another
escaping, prometheus_client 0.26 then writes vllm:x as vllm_x (client_python#1177).
"""

from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def start_page(port: int, registry: CollectorRegistry, host: str = "127.0.0.1") -> WSGIServer:
    """Port 0 is a free one. Raises OSError."""
    server, _ = start_http_server(port, host, registry=registry)
    server.set_app(page_of(registry))
    return server


def page_of(registry: CollectorRegistry) -> App:
    """As an application of WSGI."""
    app = make_wsgi_app(registry)

    def read(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return app(environ, start)

    return read
