"""quire.v1.AdminService: an operator's questions to a running server, and commands."""

import asyncio
import time

from grpc import aio
from quire.v1 import admin_service_pb2 as pb
from quire.v1 import admin_service_pb2_grpc as pb_grpc

from cache_manager.block_hash import DEFAULT_TENANT
from cache_manager.ledger import Holder, PageState
from rpc.engines.fleet import Fleet
from rpc.frontend.errors import invalid
from rpc.frontend.frontend import Frontend
from rpc.services import convert
from rpc.services.errors import failures_to
from rpc.services.load import load_of, page_map_of, replica_message, requests_of, server_info
from rpc.services.writer import StreamWriter
from scheduler.events import AdminQuestion
from scheduler.invalid import InvalidRequest

STATES = {
    PageState.FREE: pb.PAGE_STATE_FREE,
    PageState.HELD: pb.PAGE_STATE_HELD,
    PageState.CACHED: pb.PAGE_STATE_CACHED,
    PageState.SET_ASIDE: pb.PAGE_STATE_SET_ASIDE,
}

REQUESTS, MOST_REQUESTS = 100, 1000  # entries of a list: by default, and at most
LEAST_INTERVAL = 0.1  # seconds between two messages of WatchLoad


class AdminService(pb_grpc.AdminServiceServicer):
    """Serves operators' calls.

    Args:
        frontend: Frontend of the served model.
        fleet: Engines behind it.
    """

    def __init__(self, frontend: Frontend, fleet: Fleet) -> None:
        self._frontend, self._fleet = frontend, fleet
        self._started = time.monotonic()

    async def ListReplicas(  # noqa: N802 - gRPC's name
        self, _request: pb.ListReplicasRequest, _context: aio.ServicerContext
    ) -> pb.ListReplicasResponse:
        return pb.ListReplicasResponse(
            replicas=[replica_message(replica) for replica in self._frontend.replicas.newest]
        )

    async def DrainReplica(  # noqa: N802
        self, request: pb.DrainReplicaRequest, context: aio.ServicerContext
    ) -> pb.DrainReplicaResponse:
        async with failures_to(context, within=""):
            return pb.DrainReplicaResponse(moved_count=self._fleet.drain(request.replica))

    async def ResumeReplica(  # noqa: N802
        self, request: pb.ResumeReplicaRequest, context: aio.ServicerContext
    ) -> pb.ResumeReplicaResponse:
        async with failures_to(context, within=""):
            self._fleet.resume(request.replica)
            return pb.ResumeReplicaResponse()

    async def RestartReplica(  # noqa: N802
        self, request: pb.RestartReplicaRequest, context: aio.ServicerContext
    ) -> pb.RestartReplicaResponse:
        async with failures_to(context, within=""):
            return pb.RestartReplicaResponse(moved_count=await self._fleet.restart(request.replica))

    async def GetPageMap(  # noqa: N802 - gRPC's name
        self, request: pb.GetPageMapRequest, context: aio.ServicerContext
    ) -> pb.GetPageMapResponse:
        async with failures_to(context, within=""):
            pages = await page_map_of(self._frontend, request.replica)
        return pb.GetPageMapResponse(
            page_size=pages.page_size,
            states=[STATES[PageState(state)] for state in pages.states.tolist()],
            holder_counts=pages.counts.tolist(),
            holders=[self._holder(holder) for holder in pages.holders],
        )

    def _holder(self, holder: Holder) -> pb.PageHolder:
        pages = holder.pages.tolist()
        if holder.is_step:
            return pb.PageHolder(step=holder.number, pages=pages)
        return pb.PageHolder(request_id=self._frontend.request_of(holder.number), pages=pages)

    async def ResetPrefixCache(  # noqa: N802 - gRPC's name
        self, request: pb.ResetPrefixCacheRequest, context: aio.ServicerContext
    ) -> pb.ResetPrefixCacheResponse:
        async with failures_to(context, within=""):
            answer = await self._frontend.ask(AdminQuestion.RESET_PREFIX_CACHE, request.replica)
            return pb.ResetPrefixCacheResponse(page_count=answer.forgotten)

    async def GetServerInfo(  # noqa: N802
        self, _request: pb.GetServerInfoRequest, context: aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        async with failures_to(context, within=""):
            return server_info(self._frontend)

    async def GetLoad(  # noqa: N802
        self, _request: pb.GetLoadRequest, _context: aio.ServicerContext
    ) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(load=load_of(self._frontend, self._started))

    async def WatchLoad(  # noqa: N802
        self, request: pb.WatchLoadRequest, context: aio.ServicerContext
    ) -> None:
        async with failures_to(context, within=""):
            interval = _interval(request)
            writer = StreamWriter(context, self._frontend.settings.write_stall)
            await writer.run(self._send_load(writer, interval))

    async def _send_load(self, writer: StreamWriter, interval: float) -> None:
        """Writes the load every `interval` seconds."""
        while True:
            await writer.write(pb.WatchLoadResponse(load=load_of(self._frontend, self._started)))
            await asyncio.sleep(interval)

    async def ListRequests(  # noqa: N802
        self, request: pb.ListRequestsRequest, context: aio.ServicerContext
    ) -> pb.ListRequestsResponse:
        async with failures_to(context, within=""):
            if request.max_count > MOST_REQUESTS:
                raise invalid(InvalidRequest("max_count", request.max_count, f"must be at most {MOST_REQUESTS}"))
            return requests_of(self._frontend, request.max_count or REQUESTS)

    async def CancelRequest(  # noqa: N802
        self, request: pb.CancelRequestRequest, context: aio.ServicerContext
    ) -> pb.CancelRequestResponse:
        async with failures_to(context, within=""):
            self._frontend.abort(request.tenant or DEFAULT_TENANT, request.request_id)
            return pb.CancelRequestResponse()


def _interval(request: pb.WatchLoadRequest) -> float:
    """Returns the seconds between two messages. Raises RequestFailed where they are too few."""
    try:
        given = convert.seconds(request, "interval", "interval")
        if given is not None and given < LEAST_INTERVAL:
            raise InvalidRequest("interval", given, f"must be at least {LEAST_INTERVAL} s")
    except InvalidRequest as error:
        raise invalid(error) from None
    return 1.0 if given is None else given
