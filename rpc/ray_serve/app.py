"""Quire as an application of Ray Serve: its ingress is the OpenAI gateway, its engines are Ray actors.

    serve run quire.ray_serve:app model=DIR replicas=2

Arguments are flags of `quire serve`. Each Serve replica has a server of its own beside it on its node, which places
engines in the cluster and supervises them. Tokens go from the engines to the server over the engine link, never through
Serve's handles. The cluster must require a token, as always with --ray-address.
"""

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from rpc.gateway.app import Gateway
from rpc.gateway.metrics import GatewayMetrics
from rpc.gateway.settings import GatewaySettings
from rpc.gateway.upstream import Upstream
from rpc.gateway.watching import RequestObserver
from rpc.ray_serve.hosted import HostedGateway
from rpc.ray_serve.sidecar import ServerSidecar

DRAIN_SECONDS = 90.0  # for running requests when a replica is stopped


class QuireIngress:
    """One Serve replica: a gateway in it, a server beside it."""

    async def __init__(self, flags: Mapping[str, str]) -> None:  # type: ignore[misc] # Serve awaits it
        settings = GatewaySettings()
        self._server = await ServerSidecar.start(ray.get_runtime_context().gcs_address, flags)
        self._upstream = Upstream([self._server.address], settings.request_time)
        # These metrics are not exported: Serve has its own for its ingress.
        self._gateway = Gateway(self._upstream, settings, RequestObserver(GatewayMetrics()))

    def __serve_build_asgi_app__(self) -> HostedGateway:
        """Returns the application. Serve calls this after the constructor has returned."""
        return HostedGateway(self._gateway, self._close)

    def check_health(self) -> None:
        """Raises RuntimeError if the server has ended. Serve calls this, and then makes a new replica."""
        self._server.check()

    async def _close(self) -> None:
        await self._upstream.close()
        await self._server.stop()


def app(arguments: dict[str, str]) -> serve.Application:
    """Builds the application.

    Args:
        arguments: Flag of `quire serve` without its dashes, to its value; "true" for flags without one.
    """
    settings = GatewaySettings()
    options: dict[str, Any] = {
        "name": "quire",
        "max_ongoing_requests": settings.max_calls,
        "graceful_shutdown_timeout_s": DRAIN_SECONDS,
        "ray_actor_options": {"num_cpus": 1},
    }
    return serve.deployment(**options)(serve.ingress()(QuireIngress)).bind(dict(arguments))
