"""inference.GRPCInferenceService over a `Frontend`."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial

from grpc import aio

from rpc.access.door import OPEN_DOOR, Door
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.observe.tracing import trace_of
from rpc.services.errors import as_failure, failures_to
from rpc.services.inference import pb
from rpc.services.inference.answers import Answers, failed_answer
from rpc.services.inference.asking import Asked, check_version, read_request, renamed
from rpc.services.inference.description import model_config, model_metadata, server_metadata
from rpc.services.inference.room import Room
from rpc.services.inference.statistics import Passage, Statistics
from rpc.services.writer import SlowReader, Writer

Send = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]
TEXTS = 2**14  # tokens whose text is remembered


class InferenceService:
    """The methods that there are; `handlers` makes the others of the protocol."""

    def __init__(self, frontend: Frontend, door: Door = OPEN_DOOR) -> None:
        self._frontend, self._door, self._statistics = frontend, door, Statistics()
        self._model, self._sees = frontend.preparer.name, frontend.preparer.images is not None
        self._token_text = lru_cache(TEXTS)(lambda token: frontend.preparer.tokenizer.decode([token], False))

    # What there is

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
            return model_metadata(self._model, self._sees)

    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: aio.ServicerContext
    ) -> pb.ModelConfigResponse:
        async with failures_to(context, within=""):
            self._check_model(request.name, request.version)
            return pb.ModelConfigResponse(config=model_config(self._model, self._sees))

    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: aio.ServicerContext
    ) -> pb.ModelStatisticsResponse:
        async with failures_to(context, within=""):
            self._check_model(request.name, request.version)
            return pb.ModelStatisticsResponse(model_stats=[self._statistics.message(self._model)])

    def _check_model(self, model: str, version: str) -> None:
        """Raises RequestFailed."""
        check_version(version)
        self._frontend.preparer.check_model(model)

    # Requests

    async def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: aio.ServicerContext
    ) -> pb.ModelInferResponse:
        async with failures_to(context, within=""):
            with self._counted() as passage:
                asked = self._asked(request, context)
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
            # No more of a stream is held than can run at once, nor than fits; what comes after it is not read.
            room, turn = Room(self._frontend.limits(self._door.caller(context).tenant).sequences), asyncio.Lock()
            writer = Writer(context, self._frontend.settings.write_stall)

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
        """One request of a stream; its failure is an answer too."""
        try:
            with self._counted() as passage:
                await self._stream(self._asked(request, context), context, send, passage)
        except SlowReader:
            raise
        except Exception as error:
            await send(failed_answer(request.id, self._model, as_failure(error)))

    async def _stream(self, asked: Asked, context: aio.ServicerContext, send: Send, passage: Passage) -> None:
        async with self._open(asked, context, asked.stream) as live:
            passage.open()
            answers, last = self._answers(asked, live), False
            while not last:
                await live.wait()
                if live.stream.failure is not None:
                    raise live.stream.failure
                last = live.stream.ended  # asked before an answer is sent: the end may come meanwhile
                if last:
                    passage.end(live.served)
                if asked.stream or last:
                    answer = await self._frontend.pacer.run(answers.next(last))
                    await send(pb.ModelStreamInferResponse(infer_response=answer))

    # What both share

    @contextmanager
    def _counted(self) -> Iterator[Passage]:
        """A request; what it fails with has this protocol's names."""
        with self._statistics.counted() as passage:
            try:
                yield passage
            except RequestFailed as failure:
                raise renamed(failure) from None

    def _asked(self, request: pb.ModelInferRequest, context: aio.ServicerContext) -> Asked:
        """Raises RequestFailed, counted."""
        tenant = self._door.caller(context).tenant
        most = self._frontend.limits(tenant).request.request_id_bytes
        try:
            asked = read_request(request, most)
        except RequestFailed as failure:
            trace = trace_of(context.invocation_metadata())
            raise self._frontend.accounting.turned_away(failure, _new_id(), tenant, trace) from None
        return replace(asked, spec=replace(asked.spec, tenant=tenant))

    def _open(self, asked: Asked, context: aio.ServicerContext, streaming: bool) -> AbstractAsyncContextManager[Live]:
        trace = trace_of(context.invocation_metadata())
        return self._frontend.open(asked.spec, _new_id(), context.time_remaining(), streaming, trace)

    def _answers(self, asked: Asked, live: Live) -> Answers:
        return Answers(asked, live.stream, self._model, self._token_text)


def _new_id() -> str:
    """A client's own ids need not be unique, not even among those of one stream."""
    return secrets.token_hex(16)
