"""quire.v1.AdminService: what an operator can ask of a running server, and tell it."""

from grpc import aio
from quire.v1 import admin_service_pb2 as pb
from quire.v1 import admin_service_pb2_grpc as pb_grpc

from cache_manager.ledger import Holder, PageState
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.services.errors import abort
from scheduler.events import Answer, Question

STATES = {
    PageState.FREE: pb.PAGE_STATE_FREE,
    PageState.HELD: pb.PAGE_STATE_HELD,
    PageState.CACHED: pb.PAGE_STATE_CACHED,
    PageState.SET_ASIDE: pb.PAGE_STATE_SET_ASIDE,
}


class AdminService(pb_grpc.AdminServiceServicer):
    """Over the engines of one frontend."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

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
