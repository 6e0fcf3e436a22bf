"""inference.GRPCInferenceService over a `Frontend`."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial

from grpc import aio

from rpc.access.authentication import NO_AUTHENTICATION, AuthenticationInterceptor
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.observe.tracing import trace_of
from rpc.services.errors import as_failure, failures_to
from rpc.services.inference import pb
from rpc.services.inference.answers import Answers, failed_answer
from rpc.services.inference.asking import InferRequest, check_version, read_request, renamed
from rpc.services.inference.description import model_config, model_metadata, server_metadata
from rpc.services.inference.room import Room
from rpc.services.inference.statistics import Passage, Statistics
from rpc.services.writer import SlowReader, StreamWriter

Send = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]
TEXTS = 2**14  # tokens whose text is cached


class InferenceService:
    """The supported methods of the protocol; `handlers` refuses the others.

    Args:
        frontend: Frontend of the served model.
        authentication: Authenticates the calls.

    Attributes:
        statistics: Counts of requests by this protocol.
    """

    def __init__(self, frontend: Frontend, authentication: AuthenticationInterceptor = NO_AUTHENTICATION) -> None:
        self._frontend, self._authentication, self.statistics = frontend, authentication, Statistics()
        self._model, self._vision = frontend.preparer.name, frontend.preparer.images is not None
        self._token_text = lru_cache(TEXTS)(lambda token: frontend.preparer.tokenizer.decode([token], False))

    # Server and model

    async def ServerLive(  # noqa: N802 - gRPC's name
        self, _request: pb.ServerLiveRequest, _context: aio.ServicerContext
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, _request: pb.ServerReadyRequest, _context: aio.ServicerContext
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._frontend.health())

    async def ModelReady(  # noqa: N802
        self, request: pb.ModelReadyRequest, _context: aio.ServicerContext
    ) -> pb.ModelReadyResponse:
        with suppress(RequestFailed):
            self._check_model(request.name, request.version)
            return pb.ModelReadyResponse(ready=self._frontend.health())
        return pb.ModelReadyResponse(ready=False)

    async def ServerMetadata(  # noqa: N802
        self, _request: pb.ServerMetadataRequest, _context: aio.ServicerContext
    ) -> pb.ServerMetadataResponse:
        return server_metadata()

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: aio.ServicerContext
    ) -> pb.ModelMetadataResponse:
        async with failures_to(context, within=""):
            self._check_model(request.name, request.version)
            return model_metadata(self._model, self._vision)

    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: aio.ServicerContext
    ) -> pb.ModelConfigResponse:
        async with failures_to(context, within=""):
            self._check_model(request.name, request.version)
            return pb.ModelConfigResponse(config=model_config(self._model, self._vision))

    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: aio.ServicerContext
    ) -> pb.ModelStatisticsResponse:
        async with failures_to(context, within=""):
            self._check_model(request.name, request.version)
            return pb.ModelStatisticsResponse(model_stats=[self.statistics.message(self._model)])

    def _check_model(self, model: str, version: str) -> None:
        """Raises RequestFailed NOT_FOUND for another model, or another version of it."""
        check_version(version)
        self._frontend.preparer.check_model(model)

    # Requests

    async def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: aio.ServicerContext
    ) -> pb.ModelInferResponse:
        async with failures_to(context, within=""):
            with self._count_request() as passage:
                asked = self._read(request, context)
                async with self._open(asked, context, streaming=False) as live:
                    passage.open()
                    while not live.stream.ended:
                        await live.wait()
                    if live.stream.failure is not None:
                        raise live.stream.failure
                    passage.end(live.served)
                    return await self._frontend.pacer.run(self._answers(asked, live).next(final=True))

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: aio.ServicerContext
    ) -> None:
        async with failures_to(context, within=""):
            # Requests of a stream are read only as far as they can run at once, and fit in memory.
            tenant = self._authentication.authenticate(context).tenant
            room, turn = Room(self._frontend.limits(tenant).sequences), asyncio.Lock()
            writer = StreamWriter(context, self._frontend.settings.write_stall)

            async def send(response: pb.ModelStreamInferResponse) -> None:
                async with turn:
                    await writer.run(writer.write(response))

            try:
                async with asyncio.TaskGroup() as group:
                    async for request in requests:
                        size = request.ByteSize()
                        await room.enter(size)
                        task = group.create_task(self._serve(request, context, send))
                        task.add_done_callback(partial(room.leave, size))
            except BaseExceptionGroup as failed:
                slow, _ = failed.split(SlowReader)
                raise (failed if slow is None else slow.exceptions[0]) from None

    async def _serve(self, request: pb.ModelInferRequest, context: aio.ServicerContext, send: Send) -> None:
        """Serves one request of a stream, and sends its failure as an answer."""
        try:
            with self._count_request() as passage:
                await self._stream(self._read(request, context), context, send, passage)
        except SlowReader:
            raise
        except Exception as error:
            await send(failed_answer(request.id, self._model, as_failure(error)))

    async def _stream(self, asked: InferRequest, context: aio.ServicerContext, send: Send, passage: Passage) -> None:
        async with self._open(asked, context, asked.stream) as live:
            passage.open()
            answers, last = self._answers(asked, live), False
            while not last:
                await live.wait()
                if live.stream.failure is not None:
                    raise live.stream.failure
                last = live.stream.ended  # read before an answer is sent: the end may come meanwhile, with more tokens
                if last:
                    passage.end(live.served)
                if asked.stream or last:
                    answer = await self._frontend.pacer.run(answers.next(last))
                    await send(pb.ModelStreamInferResponse(infer_response=answer))

    # Both methods

    @contextmanager
    def _count_request(self) -> Iterator[Passage]:
        """Counts a request, and names the field of its failure as this protocol does."""
        with self.statistics.counted() as passage:
            try:
                yield passage
            except RequestFailed as failure:
                raise renamed(failure) from None

    def _read(self, request: pb.ModelInferRequest, context: aio.ServicerContext) -> InferRequest:
        """Reads a request. Raises RequestFailed, and counts it, for one that cannot be served."""
        tenant = self._authentication.authenticate(context).tenant
        most = self._frontend.limits(tenant).request.request_id_bytes
        try:
            asked = read_request(request, most)
        except RequestFailed as failure:
            trace = trace_of(context.invocation_metadata())
            raise self._frontend.accounting.turned_away(failure, _new_id(), tenant, trace) from None
        return replace(asked, spec=replace(asked.spec, tenant=tenant))

    def _open(
        self, asked: InferRequest, context: aio.ServicerContext, streaming: bool
    ) -> AbstractAsyncContextManager[Live]:
        trace = trace_of(context.invocation_metadata())
        return self._frontend.open(asked.spec, _new_id(), context.time_remaining(), streaming, trace)

    def _answers(self, asked: InferRequest, live: Live) -> Answers:
        return Answers(asked, live.stream, self._model, self._token_text)


def _new_id() -> str:
    """Mints a request id, since a client's own ids need not be unique, not even in one stream."""
    return secrets.token_hex(16)
