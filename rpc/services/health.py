"""grpc.health.v1.Health whose answer is progress: a server whose engine has work and finishes no step is NOT_SERVING.

Written anew because the servicer of grpcio-health-checking 1.81 goes deaf for all watchers of a service when one
leaves.
"""

import asyncio
from collections.abc import Callable

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

PERIOD = 0.1  # seconds between two looks at the engine


class HealthService(health_pb2_grpc.HealthServicer):
    """services: names that are known, beside "" for the server as a whole. healthy: asked each time."""

    def __init__(self, services: tuple[str, ...], healthy: Callable[[], bool]) -> None:
        self._services, self._healthy = {"", *services}, healthy
        self._closing = asyncio.Event()

    def status(self, service: str) -> "health_pb2.HealthCheckResponse.ServingStatus":
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._healthy():
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
        told = None
        while True:
            now = self.status(request.service)
            if now != told:
                await context.write(health_pb2.HealthCheckResponse(status=now))
                told = now
            if self._closing.is_set():
                return
            try:
                async with asyncio.timeout(PERIOD):
                    await self._closing.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """Ends all watches, each with the last status: else they would hold a stopping server up."""
        self._closing.set()
