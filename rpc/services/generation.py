"""quire.v1.GenerationService over a `Frontend`."""

import asyncio
import secrets
import string
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext

from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.access.authentication import NO_AUTHENTICATION, AuthenticationInterceptor
from rpc.frontend.errors import RequestFailed, invalid
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.frontend.pacing import Pacer
from rpc.observe.tracing import trace_of
from rpc.services import convert
from rpc.services.errors import as_failure, failures_to
from rpc.services.writer import StreamWriter
from rpc.status import status_of
from scheduler.invalid import InvalidRequest

REQUEST_ID_HEADER = "x-request-id"
VISIBLE = frozenset(string.ascii_letters + string.digits + string.punctuation)


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Serves Generate, StreamGenerate and BatchGenerate.

    Args:
        frontend: Frontend of the served model.
        authentication: Authenticates the calls.
    """

    def __init__(self, frontend: Frontend, authentication: AuthenticationInterceptor = NO_AUTHENTICATION) -> None:
        self._frontend, self._authentication = frontend, authentication

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: pb.GenerateRequest, context: aio.ServicerContext
    ) -> pb.GenerateResponse:
        async with failures_to(context):
            request_id = await self._accept(request.request_id, context)
            return await self._generate(request, request_id, context)

    async def StreamGenerate(  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: aio.ServicerContext
    ) -> None:
        async with failures_to(context):
            request_id = await self._accept(request.request_id, context)
            tenant, trace = self._authentication.authenticate(context).tenant, _trace(context)
            try:
                spec = convert.spec_from(request.spec, tenant)
                grouping = convert.grouping_from(request.stream_options, self._frontend.settings.backlog_tokens // 2)
            except RequestFailed as failure:
                raise self._frontend.accounting.turned_away(failure, request_id, tenant, trace) from None
            writer = StreamWriter(context, self._frontend.settings.write_stall)
            async with self._frontend.open(spec, request_id, context.time_remaining(), trace=trace) as live:
                await writer.run(_send(live, grouping, writer, self._frontend.pacer))

    async def BatchGenerate(  # noqa: N802
        self, request: pb.BatchGenerateRequest, context: aio.ServicerContext
    ) -> None:
        async with failures_to(context):
            tenant = self._authentication.authenticate(context).tenant
            most = self._frontend.limits(tenant).request.batch_requests
            if len(request.requests) > most:
                count = f"{len(request.requests)} entries"
                failure = invalid(InvalidRequest("requests", count, f"at most {most} in one batch"))
                raise self._frontend.accounting.refused(failure, tenant)
            # At most as many entries of a batch as can run at once are in the engine, and one is at the tokenizer. The
            # rest of a batch must not fill queues that all clients share.
            slots, turn = asyncio.Semaphore(self._frontend.limits(tenant).sequences), asyncio.Lock()
            entries = [
                asyncio.create_task(self._entry(position, entry, slots, turn, context))
                for position, entry in enumerate(request.requests)
            ]
            try:
                writer = StreamWriter(context, self._frontend.settings.write_stall)
                await writer.run(_send_entries(entries, writer))
            finally:
                for entry in entries:
                    entry.cancel()
                await asyncio.gather(*entries, return_exceptions=True)

    async def _accept(self, given: str, context: aio.ServicerContext) -> str:
        """Returns the request's id, of the message, the metadata or minted, and sends it as initial metadata."""
        header = dict(context.invocation_metadata() or ()).get(REQUEST_ID_HEADER, "")
        tenant = self._authentication.authenticate(context).tenant
        request_id = self._request_id(given or (header if isinstance(header, str) else ""), tenant)
        with self._frontend.accounting.counting_cancel(tenant):
            await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))
        return request_id

    def _request_id(self, given: str, tenant: str) -> str:
        most = self._frontend.limits(tenant).request.request_id_bytes
        if len(given) > most or not VISIBLE.issuperset(given):
            reason = f"must be at most {most} visible ASCII characters"
            raise self._frontend.accounting.refused(invalid(InvalidRequest("request_id", given, reason)), tenant)
        return given or secrets.token_hex(16)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        request_id: str,
        context: aio.ServicerContext,
        turn: AbstractAsyncContextManager[object] | None = None,
    ) -> pb.GenerateResponse:
        """Serves a request to its end, and returns its result.

        Args:
            request: The request.
            request_id: Its id.
            context: Context of its call.
            turn: Held while the request is opened; None: nothing is held.
        """
        tenant, trace = self._authentication.authenticate(context).tenant, _trace(context)
        try:
            spec = convert.spec_from(request.spec, tenant)
        except RequestFailed as failure:
            raise self._frontend.accounting.turned_away(failure, request_id, tenant, trace) from None
        async with AsyncExitStack() as stack:
            async with turn or nullcontext():
                remaining = context.time_remaining()
                opened = self._frontend.open(spec, request_id, remaining, streaming=False, trace=trace)
                live = await stack.enter_async_context(opened)
            while not live.stream.ended:
                await live.wait()
            return await self._frontend.pacer.run(convert.result_message(live.stream, request_id))

    async def _entry(
        self,
        position: int,
        request: pb.GenerateRequest,
        slots: asyncio.Semaphore,
        turn: asyncio.Lock,
        context: aio.ServicerContext,
    ) -> pb.BatchGenerateResponse:
        tenant = self._authentication.authenticate(context).tenant
        async with self.hold_slot(slots, tenant):
            try:
                request_id = self._request_id(request.request_id, tenant)
                response = await self._generate(request, request_id, context, self.hold_slot(turn, tenant))
            except Exception as error:
                status = status_of(as_failure(error))
                entry = pb.EntryError(code=status.code, message=status.message, details=status.details)
                return pb.BatchGenerateResponse(position=position, error=entry)
            return pb.BatchGenerateResponse(position=position, response=response)

    @asynccontextmanager
    async def hold_slot(self, slot: asyncio.Semaphore | asyncio.Lock, tenant: str) -> AsyncIterator[None]:
        """Holds a slot for the block. An entry of a batch that is cancelled while it waits for the slot is counted."""
        with self._frontend.accounting.counting_cancel(tenant):
            await slot.acquire()
        try:
            yield
        finally:
            slot.release()


async def _send_entries(entries: list[asyncio.Task[pb.BatchGenerateResponse]], writer: StreamWriter) -> None:
    """Writes each entry when it is done."""
    for done in asyncio.as_completed(entries):
        await writer.write(await done)


def _trace(context: aio.ServicerContext) -> dict[str, str]:
    return trace_of(context.invocation_metadata())


async def _send(live: Live, grouping: convert.Grouping, writer: StreamWriter, pacer: Pacer) -> None:
    """Writes a stream's deltas as they come, grouped as the client asks.

    The first message goes out with the first token, the last one has the usage. Tokens that come while a message is
    written go into the next one.

    Raises:
        RequestFailed: The stream has failed.
    """
    stream, first, last = live.stream, True, False
    while not last:
        await live.wait(1 if first else grouping.tokens, grouping.delay)
        if stream.failure is not None:
            raise stream.failure
        last = stream.ended  # read before the message is written: the end may come meanwhile, with more tokens
        message = pb.StreamGenerateResponse()
        for delta in stream.take():
            added = convert.add_delta(message, delta, stream.spec.output.token_ids)
            if delta.logprobs:
                await pacer.run(convert.add_logprobs(delta.logprobs, added.logprobs))
        if first:
            message.request_id = live.request_id
            message.prompt_info.CopyFrom(convert.prompt_info(stream))
            await pacer.run(convert.add_logprobs(stream.prompt_logprobs, message.prompt_info.logprobs))
            first = False
        if last or grouping.usage:
            message.usage.CopyFrom(convert.usage(stream))
        await writer.write(message)
