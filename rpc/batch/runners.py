"""Runners of a batch job's requests: an engine of the job's own, or a server's BatchGenerate."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
from google.rpc import code_pb2, error_details_pb2
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc
from quire.v1 import tokenization_service_pb2 as tokenization_pb

from rpc.batch.line import CALL_FAILED
from rpc.batch.retries import BUSY, PAUSE, JobStoppedError, RetryPolicy
from rpc.cache_secret import read_secret
from rpc.client.errors import UnavailableError, error_of, message_hint
from rpc.client.failures import Failure
from rpc.client.failures import failure_of as call_failure
from rpc.client.security import OPEN, Metadata, Security
from rpc.engines.supervisor import Supervisor
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import load_preparer
from rpc.hosts import choose_hosts
from rpc.observe.metrics import Metrics
from rpc.services import convert
from rpc.services.models import model_message
from rpc.services.tokenization import detokenized, tokenized
from rpc.settings import ServerSettings

log = logging.getLogger("quire.batch")

CALL_ENTRIES, CALL_BYTES, CALLS = 64, 48 * 1024, 8
"""Entries and bytes of one BatchGenerate call, and calls at once. By default every server takes 64 KiB."""
UNARY_CALLS = 32  # of `ServedModels`, at a server at once
SILENT, CONNECT = 1.0, 10.0  # seconds for a server's first answer, until a warning and until the job gives up
NOT_CONNECTED = Failure(grpc.StatusCode.UNAVAILABLE, "not connected")
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),  # notices a machine that is gone
    ("grpc.keepalive_timeout_ms", 10_000),
]


class RequestRunner(Protocol):
    """Runs requests of a job.

    Attributes:
        in_flight: Number of requests worth running at once.
    """

    in_flight: int

    def run(self, request: pb.GenerateRequest) -> Awaitable[pb.GenerateResponse]:
        """Runs one request once.

        Raises:
            RequestFailed: The request failed.
            JobStoppedError: The job cannot go on now.
        """

    def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Awaitable[Any]:
        """Makes a unary call for `rpc.gateway.served.ServedModels`. Raises RequestFailed, JobStoppedError."""


class LocalRunner:
    """Gives requests straight to a frontend of this process."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self.in_flight = 2 * frontend.info.limits.sequences
        self._places = asyncio.Semaphore(self.in_flight)  # a line of several prompts runs several requests

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        request_id, spec = secrets.token_hex(16), convert.spec_from(request.spec)
        async with self._places, self._frontend.open(spec, request_id, None, streaming=False) as live:
            while not live.stream.ended:
                await live.wait()
            return await self._frontend.pacer.run(convert.result_message(live.stream, request_id))

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        del stub, metadata
        match request:
            case model_pb.ListModelsRequest():
                return model_pb.ListModelsResponse(models=[model_message(self._frontend)])
            case tokenization_pb.TokenizeRequest():
                return await tokenized(self._frontend, request)
            case tokenization_pb.DetokenizeRequest():
                return await detokenized(self._frontend, request)
            case _:
                raise RequestFailed("INTERNAL", "NO_ANSWER", f"{method} is answered by servers alone")


@asynccontextmanager
async def local_runner(settings: ServerSettings) -> AsyncIterator[LocalRunner]:
    """Starts an engine without a server, and yields its runner. Raises as a host's `launch`."""
    preparer = await asyncio.to_thread(
        load_preparer, settings.model, structured_output_backend=settings.frontend.structured_output_backend
    )
    # Requests wait for the next engine for as long as the job would, so that one which engines die of is found.
    most = 2 * settings.scheduler.max_sequences
    many = replace(settings.frontend, request_time=convert.LONGEST, max_preparing=most, failover=BUSY)
    secret = read_secret(settings.cache)
    frontend = Frontend(preparer, many, Metrics(preparer.name), secret)
    supervisor = Supervisor(choose_hosts(settings, secret), frontend)
    try:
        await supervisor.start()
        yield LocalRunner(frontend)
    finally:
        await supervisor.stop()
        frontend.shutdown()


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request on its way to a server.

    Attributes:
        request: The request.
        answer: Its response or failure, once known.
        isolated: Whether it shares no call with other requests.
    """

    request: pb.GenerateRequest
    answer: asyncio.Future[pb.GenerateResponse]
    isolated: bool = False


class ServerRunner:
    """Sends requests to a server, many in each BatchGenerate. `work` must run while requests do."""

    in_flight = CALLS * CALL_ENTRIES

    def __init__(self, channel: aio.Channel, server: str, policy: RetryPolicy, metadata: Metadata = ()) -> None:
        self._stub, self._server, self._policy = pb_grpc.GenerationServiceStub(channel), server, policy
        self._channel, self._metadata = channel, metadata
        self._unary_calls = asyncio.Semaphore(UNARY_CALLS)
        self._pending: deque[PendingRequest] = deque()
        self._arrived = asyncio.Event()

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        pending = PendingRequest(request, asyncio.get_running_loop().create_future())
        self._enqueue([pending])
        return await pending.answer

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        async with self._unary_calls:
            while True:
                call = getattr(stub(self._channel), method)(request, metadata=(*self._metadata, *metadata))
                try:
                    answer = await call
                except aio.AioRpcError as error:
                    if not is_away(error):
                        self._policy.answered()
                        raise request_failed(error) from None
                    self._away(error)
                    await asyncio.sleep(PAUSE)
                else:
                    self._policy.answered()
                    return answer

    def _enqueue(self, requests: list[PendingRequest]) -> None:
        self._pending.extend(requests)
        self._arrived.set()

    async def work(self) -> None:
        """Sends pending requests, until cancelled."""
        await asyncio.gather(*(self._send_calls() for _ in range(CALLS)))

    async def _send_calls(self) -> None:
        while True:
            call = await self._collect()
            try:
                await self._send(call)
                _fail(call, RequestFailed("INTERNAL", "NOT_ANSWERED", "the server left this entry of a batch out"))
            except aio.AioRpcError as error:
                await self._call_failed([pending for pending in call if not pending.answer.done()], error)
            except Exception as error:  # a bug: without this the requests would wait for ever
                _fail(call, error)

    async def _collect(self) -> list[PendingRequest]:
        """Returns the requests of the next call: the pending ones that fit."""
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        call, size = [self._pending.popleft()], 0
        while self._pending and len(call) < CALL_ENTRIES and not (call[-1].isolated or self._pending[0].isolated):
            size += call[-1].request.ByteSize() + 8  # its tag and length
            if size + self._pending[0].request.ByteSize() > CALL_BYTES:
                break
            call.append(self._pending.popleft())
        return call

    async def _send(self, call: list[PendingRequest]) -> None:
        message = pb.BatchGenerateRequest(requests=[pending.request for pending in call])
        async for entry in self._stub.BatchGenerate(message, metadata=self._metadata):
            self._policy.answered()
            answer = call[entry.position].answer
            if answer.done():  # cancelled: the job is ending
                continue
            if entry.WhichOneof("outcome") == "response":
                answer.set_result(entry.response)
            else:
                answer.set_exception(failure_of(entry.error))

    async def _call_failed(self, left: list[PendingRequest], error: aio.AioRpcError) -> None:
        """Handles the failure of a whole call.

        Requests wait for a server that is away. A call that the server refuses for good is split into calls of one
        request, so that only the wrong request fails.
        """
        if is_away(error):
            try:
                self._away(error)
            except JobStoppedError as stopped:
                _fail(left, stopped)
            self._enqueue([pending for pending in left if not pending.answer.done()])
            await asyncio.sleep(PAUSE)
            return
        self._policy.answered()
        failure = request_failed(error)
        if len(left) == 1 or failure.retry_after is not None:
            _fail(left, failure)
        else:
            self._enqueue([PendingRequest(pending.request, pending.answer, isolated=True) for pending in left])

    def _away(self, error: aio.AioRpcError) -> None:
        """Records that the server is away. Raises JobStoppedError if it has been for too long."""
        self._policy.away(f"{self._server} does not answer: {error.details()}")


def _fail(call: list[PendingRequest], error: Exception) -> None:
    for pending in call:
        if not pending.answer.done():
            pending.answer.set_exception(error)


@asynccontextmanager
async def server_runner(server: str, policy: RetryPolicy, security: Security = OPEN) -> AsyncIterator[ServerRunner]:
    """Connects to a server, and yields its runner. Raises QuireError if it does not answer, or refuses requests."""
    async with security.aio_channel(server, OPTIONS) as channel:
        await _check_server(channel, server, security.metadata)
        runner = ServerRunner(channel, server, policy, security.metadata)
        work = asyncio.create_task(runner.work())
        try:
            yield runner
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def _check_server(channel: aio.Channel, server: str, metadata: Metadata) -> None:
    """Checks that the server answers. A refused connection fails at once, a slow one after `CONNECT` seconds.

    A server that is full, has no engine yet or is shutting down passes: the job waits for it.

    Raises:
        QuireError: No server answers, or it refuses the call.
    """
    stub, request = model_pb_grpc.ModelServiceStub(channel), model_pb.ListModelsRequest()
    asking = asyncio.ensure_future(stub.ListModels(request, timeout=CONNECT, metadata=metadata))
    try:
        answered, _ = await asyncio.wait({asking}, timeout=SILENT)
        if not answered:
            log.warning("%s has not answered yet; giving up after %g s", server, CONNECT)
        await asking
    except aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise UnavailableError(NOT_CONNECTED, server) from None
        if call_failure(error).retry_after is None:
            raise error_of(error, server) from None
    finally:
        asking.cancel()


def is_away(error: grpc.RpcError) -> bool:
    """Returns whether no server answered. One that loads a model, drains or has lost its engines says so itself."""
    failure = call_failure(error)
    return failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason


def request_failed(error: grpc.RpcError) -> RequestFailed:
    """Returns the failure of a call as a whole."""
    failure = call_failure(error)
    message = failure.message + message_hint(failure.message)
    reason, field = failure.reason or CALL_FAILED, failure.field.removeprefix("spec.")
    return RequestFailed(failure.code.name, reason, message, field, failure.retry_after)


def failure_of(error: pb.EntryError) -> RequestFailed:
    """Returns the failure of one entry of a batch; reverses `rpc.status`."""
    reason, field, retry_after = "", "", None
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for packed in error.details:
        if packed.Unpack(info):
            reason = info.reason
        elif packed.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field.removeprefix("spec.")
        elif packed.Unpack(retry):
            retry_after = retry.retry_delay.ToMilliseconds() / 1000
    return RequestFailed(code_pb2.Code.Name(error.code), reason, error.message, field, retry_after)
