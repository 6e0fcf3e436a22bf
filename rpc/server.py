"""The life of a server process: load, open ports, serve, drain on SIGTERM, exit 0."""

import asyncio
import logging
import signal
from collections.abc import Callable

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.assembly import Parts, assemble
from rpc.frontend.frontend import Frontend
from rpc.observe.metrics import Metrics
from rpc.services.generation import GenerationService
from rpc.services.health import HealthService
from rpc.settings import ListenSettings, ServerSettings, is_loopback
from scheduler.events import EngineStats

log = logging.getLogger("quire.server")

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


def channel_options(settings: ListenSettings, context: int) -> list[tuple[str, int]]:
    """context: of the model, in tokens. Keys as gRPC's core spells them; a misspelt one would be ignored."""
    return [
        ("grpc.so_reuseport", 0),  # a second server on the port fails instead of sharing it
        ("grpc.max_receive_message_length", settings.max_message_bytes or 8 * context + 2**16),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", settings.max_streams),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),  # else clients that ping while a long prompt is computed are cut off
    ]


class Server:
    """One frontend and one engine in this process. `start`, then `run` until a signal."""

    def __init__(self, settings: ServerSettings, parts: Parts) -> None:
        self._settings, self._parts = settings, parts
        self._metrics = Metrics(parts.preparer.name)
        self._frontend = Frontend(parts.preparer, settings.frontend, self._metrics)
        self._engine = parts.engine(self._frontend.sink)
        self._frontend.attach(self._engine)
        self._health = HealthService((SERVICE,), self._frontend.health)
        self._grpc = aio.server(options=channel_options(settings.listen, parts.loaded.limits.context))
        pb_grpc.add_GenerationServiceServicer_to_server(GenerationService(self._frontend), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if settings.listen.reflection:
            health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
            reflection.enable_server_reflection((SERVICE, health_name, reflection.SERVICE_NAME), self._grpc)
        self._asked_to_stop, self._hurry = asyncio.Event(), asyncio.Event()

    async def start(self) -> str:
        """Opens the ports; returns the line that names every address. Raises OSError where a port cannot be had."""
        listen = self._settings.listen
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        try:
            port = self._grpc.add_insecure_port(f"{host}:{listen.port}")
        except RuntimeError as error:
            raise OSError(f"--port {listen.port} on {listen.host} cannot be opened: {error}") from None
        try:
            self._http, _ = start_http_server(listen.metrics_port, "127.0.0.1", registry=self._metrics.registry)
        except OSError as error:
            raise OSError(f"--metrics-port {listen.metrics_port} cannot be opened: {error}") from None
        if not is_loopback(listen.host):
            log.warning("%s can be reached from other machines, without TLS and token (--allow-insecure-bind)", host)
        self._metrics.engine_stats(EngineStats(pages_total=self._parts.loaded.pages))
        self._engine.start()
        await self._grpc.start()
        return (
            f"ready: model {self._parts.preparer.name} ({self._parts.loaded.dtype}, {self._parts.loaded.device}), "
            f"gRPC {host}:{port}, metrics http://127.0.0.1:{self._http.server_port}/metrics"
        )

    def stop(self) -> None:
        """Asks `run` to drain; a second time, to end at once."""
        (self._hurry if self._asked_to_stop.is_set() else self._asked_to_stop).set()

    async def run(self) -> None:
        """Serves until `stop`, then drains: health says NOT_SERVING, running requests end, new ones are refused."""
        await self._asked_to_stop.wait()
        self._frontend.draining = True
        log.info("draining: %d requests are live", self._frontend.live_requests)
        waits = [asyncio.create_task(wait) for wait in (self._frontend.wait_idle(), self._hurry.wait())]
        await asyncio.wait(waits, timeout=self._settings.frontend.drain, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._frontend.live_requests:
            log.warning("cutting off %d requests that did not end in time", self._frontend.live_requests)
        self._health.close()
        await self._grpc.stop(grace=1.0)
        try:
            await asyncio.to_thread(self._engine.stop)
        finally:
            self._frontend.shutdown()
            await asyncio.to_thread(self._http.shutdown)
            self._http.server_close()


async def serve(settings: ServerSettings, announce: Callable[[str], None]) -> None:
    """Runs a server until SIGTERM or SIGINT. `announce` gets the ready line once requests are taken."""
    parts = await asyncio.to_thread(assemble, settings)
    server = Server(settings, parts)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    announce(await server.start())
    await server.run()
