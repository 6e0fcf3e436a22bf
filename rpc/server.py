"""The life of a server process: opens ports, loads the model, serves, drains on SIGTERM, exits 0."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from quire.v1 import admin_service_pb2_grpc as admin_pb_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc
from quire.v1 import tokenization_service_pb2 as tokenization_pb
from quire.v1 import tokenization_service_pb2_grpc as tokenization_pb_grpc

from model.settings import ModelSettings
from rpc.access.authentication import AuthenticationInterceptor
from rpc.access.certificates import server_credentials
from rpc.access.tokens import ANONYMOUS, AccessTokens
from rpc.cache_secret import read_secret
from rpc.engines.fleet import Fleet
from rpc.engines.joined import JoinedEngines
from rpc.engines.scaling import Scaling
from rpc.engines.supervisor import Supervisor
from rpc.engines.targets import TargetsFile
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import load_preparer
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.slo import SLOTracker
from rpc.heap import freeze_heap
from rpc.hosts import choose_hosts
from rpc.link.table import TableService
from rpc.observe.aliases import register_aliases
from rpc.observe.metrics import Metrics
from rpc.observe.metrics_http import serve_metrics
from rpc.observe.request_log import log_request
from rpc.observe.settings import ObserveSettings
from rpc.observe.tracing import open_traces
from rpc.paths import inputs_digest, model_directory
from rpc.ports import bracketed, check_free, open_port
from rpc.private_files import read_token
from rpc.services.admin import AdminService
from rpc.services.generation import GenerationService
from rpc.services.health import HealthService
from rpc.services.inference.handlers import SERVICE as INFERENCE
from rpc.services.inference.handlers import handlers
from rpc.services.inference.service import InferenceService
from rpc.services.models import ModelService
from rpc.services.reflected import ReflectedPool
from rpc.services.tokenization import TokenizationService
from rpc.settings import JoinedSettings, ListenSettings, ServerSettings
from scheduler.autoscaling import Autoscaler
from scheduler.bounds import message_bytes
from scheduler.settings import ImageLimits

log = logging.getLogger("quire.server")

SERVICES = (
    pb.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    tokenization_pb.DESCRIPTOR.services_by_name["TokenizationService"].full_name,
    model_pb.DESCRIPTOR.services_by_name["ModelService"].full_name,
    INFERENCE.full_name,
)


LOOPBACK = "127.0.0.1"


def channel_options(settings: ListenSettings, context: int, images: int = 0) -> list[tuple[str, int]]:
    """Returns the options of the public gRPC server. gRPC's core ignores a key that is misspelt.

    Args:
        settings: Limits of messages and streams.
        context: Context length of the model, in tokens.
        images: Bytes that the images of a message may take.
    """
    return [
        ("grpc.so_reuseport", 0),  # a second server on the port fails instead of sharing it
        ("grpc.max_receive_message_length", settings.max_message_bytes or message_bytes(context) + images),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", settings.max_streams),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),  # so that clients which ping during a long prefill are not cut off
    ]


class Dashboard(Protocol):
    """The dashboard of `--dashboard-port`: an application upon the server, which gets one and imports none."""

    async def open(self, port: int) -> str:
        """Serves the dashboard, and returns its address. Raises OSError where the port cannot be opened."""

    async def close(self) -> None:
        """Ends the dashboard, whether it was opened or not."""


MakeDashboard = Callable[[Frontend, AuthenticationInterceptor], Dashboard]


class Server:
    """The frontend of this process over a fleet of engines: `start`, `drain` after `stop`, `close` in any case.

    Args:
        listen: Addresses and access.
        images: Bounds of a request's images.
        frontend: Frontend of the served model.
        metrics: Metrics of the server.
        fleet: Engines behind the frontend.
        make_dashboard: Makes the dashboard, where the settings have a port for it.
        targets: File that lists the engines' metrics for Prometheus; None: there is none.
    """

    def __init__(
        self,
        listen: ListenSettings,
        images: ImageLimits,
        frontend: Frontend,
        metrics: Metrics,
        fleet: Fleet,
        make_dashboard: MakeDashboard,
        targets: TargetsFile | None = None,
    ) -> None:
        self._targets = targets
        self._follower: asyncio.Task[None] | None = None
        self._listen, self._images = listen, images
        self._frontend, self._metrics, self._fleet = frontend, metrics, fleet
        tokens = None if listen.token_file is None else AccessTokens(Path(listen.token_file))
        self._authentication = AuthenticationInterceptor(tokens, metrics.call_denied)
        metrics.tenants.expect([ANONYMOUS.tenant] if tokens is None else tokens.tenants)
        self._dashboard = None if listen.dashboard_port is None else make_dashboard(frontend, self._authentication)
        self._credentials = server_credentials(listen)
        self._health = HealthService(SERVICES, self._frontend.health)
        self._grpc: aio.Server | None = None
        self._admin: aio.Server | None = None
        self._http: WSGIServer | None = None
        self._stop_wanted, self._stop_at_once = asyncio.Event(), asyncio.Event()

    def public_services(self) -> aio.Server:
        listen = self._listen
        images = 4 * self._images.image_bytes if self._frontend.preparer.images is not None else 0
        options = channel_options(listen, self._frontend.preparer.context, images)
        server = aio.server(interceptors=[self._authentication], options=options)
        pb_grpc.add_GenerationServiceServicer_to_server(GenerationService(self._frontend, self._authentication), server)
        tokenization_pb_grpc.add_TokenizationServiceServicer_to_server(
            TokenizationService(self._frontend, self._authentication), server
        )
        model_pb_grpc.add_ModelServiceServicer_to_server(ModelService(self._frontend), server)
        server.add_generic_rpc_handlers((handlers(InferenceService(self._frontend, self._authentication)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if listen.reflection:
            health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
            names = (*SERVICES, health_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server, ReflectedPool())  # type: ignore[arg-type]
        return server

    def admin_services(self) -> aio.Server:
        server = aio.server(interceptors=[self._authentication], options=[("grpc.so_reuseport", 0)])
        admin_pb_grpc.add_AdminServiceServicer_to_server(AdminService(self._frontend, self._fleet), server)
        return server

    async def start(self) -> str:
        """Opens the ports, then starts the engines; returns the line that names every address.

        Until it returns, health is NOT_SERVING and requests end with STARTING.

        Raises:
            OSError: A port cannot be opened.
            Exception: Any exception of the fleet's `start`.
        """
        self._frontend.starting = True
        addresses = await self.open_ports()
        if self._targets is not None:
            self._targets.write()  # a file that cannot be written is reported before the model is loaded
        await self._fleet.start()
        if self._targets is not None:
            self._targets.write()
            self._follower = asyncio.create_task(self._targets.follow())
        self._frontend.starting = False
        engine = self._frontend.info
        said = filter(None, (engine.dtype, engine.device, self._fleet.summary))
        return f"ready: model {self._frontend.preparer.name} ({', '.join(said)}), {addresses}"

    async def open_ports(self) -> str:
        """Opens the ports, and returns their addresses for the ready line. Raises OSError where one is taken."""
        listen = self._listen
        self._grpc, self._admin = self.public_services(), self.admin_services()
        address = open_port(self._grpc, "--port", listen.host, listen.port, self._credentials)
        admin = open_port(self._admin, "--admin-port", LOOPBACK, listen.admin_port)
        check_free("--metrics-port", listen.metrics_host, listen.metrics_port)
        self._http = serve_metrics(listen.metrics_port, self._metrics.registry, listen.metrics_host)
        if listen.lacks:
            log.warning("%s can be reached from other machines, and %s", listen.host, listen.lacks)
        await self._grpc.start()
        await self._admin.start()
        dashboard = (
            "" if self._dashboard is None else f", dashboard {await self._dashboard.open(listen.dashboard_port or 0)}"
        )
        metrics = f"http://{bracketed(listen.metrics_host)}:{self._http.server_port}/metrics"
        return f"gRPC {address}, metrics {metrics}, admin {admin}{dashboard}"

    def stop(self) -> None:
        """Asks for a drain; a second call, for an end at once."""
        (self._stop_at_once if self._stop_wanted.is_set() else self._stop_wanted).set()

    async def wait_stop(self) -> None:
        """Waits for `stop`."""
        await self._stop_wanted.wait()

    async def drain(self) -> None:
        """Refuses new requests, and waits for the live ones to end. Health is NOT_SERVING from now on."""
        self._frontend.draining = True
        live = self._frontend.live_requests
        log.info(
            "draining: %d requests are live%s", live, ", SIGTERM or Ctrl-C once more cuts them off" if live else ""
        )
        waits = [asyncio.create_task(wait) for wait in (self._frontend.wait_idle(), self._stop_at_once.wait())]
        await asyncio.wait(waits, timeout=self._frontend.settings.drain, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._frontend.live_requests:
            log.warning("cutting off %d requests that did not end in time", self._frontend.live_requests)

    async def close(self) -> None:
        """Ends all that was started. Raises TimeoutError where an engine does not end."""
        self._health.close()
        if self._dashboard is not None:
            await self._dashboard.close()
        for server in (self._grpc, self._admin):
            if server is not None:
                await server.stop(grace=1.0)
        try:
            await self._fleet.stop()
        finally:
            self._frontend.shutdown()
            if self._http is not None:
                await asyncio.to_thread(self._http.shutdown)
                self._http.server_close()
            if self._targets is not None and self._follower is not None:
                self._follower.cancel()
                self._targets.clear()


async def serve(settings: ServerSettings, announce: Callable[[str], None], make_dashboard: MakeDashboard) -> None:
    """Runs a server with engines of its own until SIGTERM or SIGINT.

    Args:
        settings: Settings of the server.
        announce: Gets the ready line once requests are taken.
        make_dashboard: Makes the dashboard, where the settings have a port for it.
    """
    secret, sharing = read_secret(settings.cache), settings.sharing
    scaling = settings.scaling
    slo = SLOTracker(scaling.ttft, scaling.itl)
    path = settings.engine.metrics_targets
    frontend, metrics = await _frontend(settings.model, settings.frontend, settings.images, path is None, secret, slo)
    if settings.listen.metrics_aliases == "vllm":
        register_aliases(metrics, with_engines=True)
    targets = None if path is None else TargetsFile(Path(path), frontend.replicas)
    table = None
    if sharing.address is not None:
        digest = inputs_digest(model_directory(settings.model.model))
        table = TableService(frontend.replicas, sharing.address, join_token(sharing.token_file), digest)
    least, most = settings.engine.replicas, settings.most_replicas
    metrics.replicas_wanted(least)
    scaler = Scaling(Autoscaler(scaling, least), frontend, metrics) if most > least else None
    fleet = Supervisor(choose_hosts(settings, secret), frontend, least, table, scaler)
    async with _observed(frontend, settings.observe):
        server = Server(settings.listen, settings.images, frontend, metrics, fleet, make_dashboard, targets)
        await _run(server, announce)


async def serve_joined(
    settings: JoinedSettings, announce: Callable[[str], None], make_dashboard: MakeDashboard
) -> None:
    """Runs a server with another server's engines until SIGTERM or SIGINT; Args are those of `serve`."""
    frontend, metrics = await _frontend(settings.model, settings.frontend, settings.images, shows_engines=False)
    if settings.listen.metrics_aliases == "vllm":
        register_aliases(metrics, with_engines=False)
    digest = inputs_digest(model_directory(settings.model.model))
    fleet = JoinedEngines(settings.join, join_token(settings.join.token_file), settings.request, digest, frontend)
    async with _observed(frontend, settings.observe):
        await _run(Server(settings.listen, settings.images, frontend, metrics, fleet, make_dashboard), announce)


def join_token(path: str | None) -> str:
    """Returns the token that frontends which join have to prove; "" without a file.

    Raises:
        ValueError: Others can read the file, or it has no token.
        OSError: The file cannot be read.
    """
    return "" if path is None else read_token(Path(path), "--join-token-file")


async def _frontend(
    model: ModelSettings,
    settings: FrontendSettings,
    images: ImageLimits,
    shows_engines: bool,
    secret: bytes = b"",
    slo: SLOTracker | None = None,
) -> tuple[Frontend, Metrics]:
    """Loads the preparer, and makes a frontend with its metrics.

    Args:
        model: Settings of the model.
        settings: Settings of the frontend.
        images: Bounds of a request's images.
        shows_engines: Metrics of the engines are in the server's registry.
        secret: Key of own engines' block hashes.
        slo: Tracks TTFT and ITL; None: there are no objectives.
    """
    preparer = await asyncio.to_thread(
        load_preparer,
        model,
        settings.public_prefixes,
        images,
        settings.tool_format,
        settings.reasoning_format,
        settings.structured_output_backend,
    )
    metrics = Metrics(preparer.name, shows_engines)
    return Frontend(preparer, settings, metrics, secret, slo), metrics


@asynccontextmanager
async def _observed(frontend: Frontend, settings: ObserveSettings) -> AsyncIterator[None]:
    """Reports requests that end during the block to the log and to a collector, as the settings say.

    Raises:
        ValueError: Traces are asked for, and OpenTelemetry is not installed.
    """
    traces = None if settings.otlp_traces_endpoint is None else open_traces(settings.otlp_traces_endpoint)
    frontend.reporter.watchers += [*([log_request] if settings.log_requests else []), *([traces] if traces else [])]
    try:
        yield
    finally:
        if traces is not None:
            await asyncio.to_thread(traces.close)


async def _run(server: Server, announce: Callable[[str], None]) -> None:
    freeze_heap()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    starting, stopped = asyncio.create_task(server.start()), asyncio.create_task(server.wait_stop())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            announce(starting.result())
            await stopped
            await server.drain()
    finally:
        for task in (starting, stopped):
            task.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        await server.close()
