"""The life of a gateway: opens its port, serves, drains on SIGTERM, exits 0."""

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import uvicorn
from prometheus_client import CollectorRegistry
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc

from rpc.addresses import is_loopback
from rpc.gateway.app import Gateway, with_origins
from rpc.gateway.metrics import GatewayMetrics
from rpc.gateway.protocol import bounded_config
from rpc.gateway.settings import GatewaySettings
from rpc.gateway.spans import GatewaySpans, open_spans
from rpc.gateway.tls import own_context, security_of
from rpc.gateway.upstream import Upstream
from rpc.gateway.watching import RequestObserver
from rpc.heap import freeze_heap
from rpc.observe.metrics_http import serve_metrics
from rpc.observe.settings import ObserveSettings

DEFAULTS = ObserveSettings()

log = logging.getLogger("quire.gateway")


class _GatewayServer(uvicorn.Server):
    """uvicorn's server with a bound on TLS handshakes, a callback at the start, and an exit status of 0 after a signal.

    uvicorn itself raises the signal again after its shutdown.
    """

    def __init__(self, config: uvicorn.Config, handshake: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._handshake, self._ready = handshake, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listener in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                self._protocol,
                sock=listener,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self._handshake if self.config.ssl is not None else None,
                backlog=self.config.backlog,
            )
            self.servers.append(server)
        self._ready()

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield


async def serve(
    settings: GatewaySettings,
    servers: Sequence[str],
    announce: Callable[[str], None],
    origins: Sequence[str] = (),
    observe: ObserveSettings = DEFAULTS,
) -> None:
    """Runs a gateway to these servers until SIGTERM or SIGINT.

    Args:
        settings: Settings of the gateway.
        servers: HOST:PORT of each.
        announce: Called with the ready line once the gateway takes requests.
        origins: Origins whose pages may use it from a browser.
        observe: Settings of metrics, request log and traces.

    Raises:
        OSError: A port cannot be opened, or a certificate cannot be read.
        ValueError: A certificate is invalid, or others can read its key. The connection to a server would be insecure.
            A package that traces need is not installed.
    """
    settings.check_way_to(servers)
    context, security = own_context(settings), security_of(settings)
    listener = _listener(settings)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if not is_loopback(settings.host) and context is None:
        log.warning("%s can be reached from other machines, without TLS (--allow-insecure-bind)", shown)
    url = f"{'http' if context is None else 'https'}://{shown}:{port}"
    metrics = GatewayMetrics()
    upstream = Upstream(servers, settings.request_time, security, metrics.call_failed)
    with listener, _spans(observe) as spans, _metrics_page(settings, metrics.registry) as page:
        watching = RequestObserver(metrics, observe.log_requests, spans)
        config = _config(settings, with_origins(Gateway(upstream, settings, watching), origins), context)
        freeze_heap()
        ready = f"ready: gateway {url}/v1 to {', '.join(servers)}{page}"
        try:
            if not is_loopback(settings.host) and not settings.allow_insecure_bind:
                await check_token_required(upstream, settings.host)
            server = _GatewayServer(config, settings.read_time, lambda: announce(ready))
            metrics.watch_connections(lambda: len(server.server_state.connections))
            await server.serve([listener])
        finally:
            await upstream.close()


@contextmanager
def _spans(observe: ObserveSettings) -> Iterator[GatewaySpans | None]:
    """Yields the sender of spans; None if traces are off. Raises ValueError if OpenTelemetry is not installed."""
    spans = None if observe.otlp_traces_endpoint is None else open_spans(observe.otlp_traces_endpoint)
    try:
        yield spans
    finally:
        if spans is not None:
            spans.close()


@contextmanager
def _metrics_page(settings: GatewaySettings, registry: CollectorRegistry) -> Iterator[str]:
    """Serves the metrics on a port of their own, if the settings have one.

    Yields:
        The end of the ready line, with the metrics' address.

    Raises:
        OSError: The port cannot be opened.
    """
    if settings.metrics_port is None:
        yield ""
        return
    try:
        page = serve_metrics(settings.metrics_port, registry, settings.metrics_host)
    except OSError as error:
        place = f"--metrics-port {settings.metrics_port} on {settings.metrics_host}"
        raise OSError(f"{place} cannot be opened: {error}") from None
    host = f"[{settings.metrics_host}]" if ":" in settings.metrics_host else settings.metrics_host
    try:
        yield f", metrics http://{host}:{page.server_port}/metrics"
    finally:
        page.shutdown()
        page.server_close()


async def check_token_required(upstream: Upstream, host: str) -> None:
    """Checks that the servers require a token, since the gateway itself authenticates no client.

    Raises:
        ValueError: They require none, or cannot be asked.
    """
    try:
        await upstream.ask(model_pb_grpc.ModelServiceStub, "ListModels", model_pb.ListModelsRequest(), ())
        problem = "its servers ask for no token: any client that reaches it could use the model"
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return
        problem = f"whether its servers ask for a token is not known: {error.code().name}: {error.details()}"
    raise ValueError(
        f"--host {host} can be reached from other machines, and {problem}. Start them with --token-file, serve on "
        "127.0.0.1, or insist with --allow-insecure-bind"
    )


def _config(settings: GatewaySettings, app: Any, context: ssl.SSLContext | None) -> uvicorn.Config:
    config = bounded_config(
        app,
        read_time=settings.read_time,
        write_stall=settings.write_stall,
        most=settings.max_connections,
        drain=settings.drain,
    )
    config.load()
    config.ssl = context
    return config


def _listener(settings: GatewaySettings) -> socket.socket:
    """Opens the gateway's port. Raises OSError, also if another gateway has the port."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(f"--port {settings.port} on {settings.host} cannot be opened: {error}") from None
