"""quire.v1.AdminService: what an operator can ask of a running server, and tell it."""

from grpc import aio
from quire.v1 import admin_service_pb2 as pb
from quire.v1 import admin_service_pb2_grpc as pb_grpc

from cache_manager.ledger import Holder, PageState
from rpc.engines.fleet import Fleet
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.replicas import Replica
from rpc.services.errors import abort, failures_to
from scheduler.events import Answer, Question

STATES = {
    PageState.FREE: pb.PAGE_STATE_FREE,
    PageState.HELD: pb.PAGE_STATE_HELD,
    PageState.CACHED: pb.PAGE_STATE_CACHED,
    PageState.SET_ASIDE: pb.PAGE_STATE_SET_ASIDE,
}


class AdminService(pb_grpc.AdminServiceServicer):
    """Over the engines of one frontend."""

    def __init__(self, frontend: Frontend, fleet: Fleet) -> None:
        self._frontend, self._fleet = frontend, fleet

    async def ListReplicas(  # noqa: N802 - gRPC's name
        self, _request: pb.ListReplicasRequest, _context: aio.ServicerContext
    ) -> pb.ListReplicasResponse:
        return pb.ListReplicasResponse(replicas=[_replica(replica) for replica in self._frontend.replicas.newest])

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
        pages = (await self._ask(Question.PAGE_MAP, request.replica, context)).page_map
        if pages is None:
            await abort(context, RequestFailed("INTERNAL", "NO_ANSWER", "the engine's answer has no page map"))
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
        answer = await self._ask(Question.RESET_PREFIX_CACHE, request.replica, context)
        return pb.ResetPrefixCacheResponse(page_count=answer.forgotten)

    async def _ask(self, question: Question, replica: int, context: aio.ServicerContext) -> Answer:
        try:
            return await self._frontend.ask(question, replica)
        except RequestFailed as failure:
            await abort(context, failure)


def _replica(replica: Replica) -> pb.Replica:
    stats = replica.stats
    if not replica.usable or replica.client is None:
        return pb.Replica(number=replica.number, state=pb.REPLICA_STATE_STARTING, epoch=replica.epoch)
    drained, alone = pb.REPLICA_STATE_DRAINED, pb.REPLICA_STATE_ISOLATED
    return pb.Replica(
        number=replica.number,
        state=drained
        if replica.drained or replica.leaving
        else alone
        if replica.isolated
        else pb.REPLICA_STATE_SERVING,
        epoch=replica.epoch,
        place=replica.client.place,
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        pages_used=stats.pages_used,
        pages_total=replica.client.info.pages,
        pages_cached=stats.pages_cached,
        request_count=len(replica.waiting),
    )
