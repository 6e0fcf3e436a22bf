"""grpc.health.v1.Health by progress: a server whose engine has work and finishes no step is NOT_SERVING.

The servicer of grpcio-health-checking 1.81 does not do: it stops notifying all watchers of a service when one leaves.
"""

import asyncio
from collections.abc import Callable

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

PERIOD = 0.1  # seconds between two checks for a watcher
LIVENESS = "liveness"
"""Name that is SERVING as long as the process answers: one whose engines load, or which drains, must not be killed."""


class HealthService(health_pb2_grpc.HealthServicer):
    """Serves Check and Watch.

    Args:
        services: Names of the services that are known, beside "" for the server as a whole and `LIVENESS`.
        healthy: Returns whether the server serves; called at each check.
    """

    def __init__(self, services: tuple[str, ...], healthy: Callable[[], bool]) -> None:
        self._services, self._healthy = {"", LIVENESS, *services}, healthy
        self._closing = asyncio.Event()

    def status(self, service: str) -> "health_pb2.HealthCheckResponse.ServingStatus":
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if service == LIVENESS or self._healthy():
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r} here")
        return health_pb2.HealthCheckResponse(status=self.status(request.service))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> None:
        last = None
        while True:
            now = self.status(request.service)
            if now != last:
                await context.write(health_pb2.HealthCheckResponse(status=now))
                last = now
            if self._closing.is_set():
                return
            try:
                async with asyncio.timeout(PERIOD):
                    await self._closing.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """Ends all watches, each with the last status, since they would hold up a server that stops."""
        self._closing.set()
