"""What runs a batch job's requests: an engine of the job's own, or a server's BatchGenerate."""

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
from rpc.batch.patience import PAUSE, JobStoppedError, Patience
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
"""Most of one BatchGenerate call, and most calls at once. Without --max-message-bytes every server takes 64 KiB."""
QUESTIONS = 32  # of `Served`, at a server at once
SILENT, CONNECT = 1.0, 10.0  # seconds for the first answer of a server, before it is missed and before it is given up
NOT_CONNECTED = Failure(grpc.StatusCode.UNAVAILABLE, "not connected")
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),  # a server whose machine is gone says nothing
    ("grpc.keepalive_timeout_ms", 10_000),
]


class Runner(Protocol):
    """in_flight: requests that are worth running at once."""

    in_flight: int

    def run(self, request: pb.GenerateRequest) -> Awaitable[pb.GenerateResponse]:
        """Raises RequestFailed for what concerns this request, JobStoppedError for what ends the job."""

    def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Awaitable[Any]:
        """Asks one of the small questions of `rpc.gateway.served.Served`. Raises RequestFailed, JobStoppedError."""


class LocalRunner:
    """Requests straight to a frontend of this process."""

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
    """An engine where the settings say, without a server. Raises what a host's `launch` does."""
    preparer = await asyncio.to_thread(load_preparer, settings.model)
    many = replace(settings.frontend, request_time=convert.LONGEST, max_preparing=2 * settings.scheduler.max_sequences)
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
class Asked:
    """A request on its way to a server. alone: it shares no call."""

    request: pb.GenerateRequest
    answer: asyncio.Future[pb.GenerateResponse]
    alone: bool = False


class ServerRunner:
    """Requests to a server, many in each BatchGenerate. `work` while requests run."""

    in_flight = CALLS * CALL_ENTRIES

    def __init__(self, channel: aio.Channel, server: str, patience: Patience, metadata: Metadata = ()) -> None:
        self._stub, self._server, self._patience = pb_grpc.GenerationServiceStub(channel), server, patience
        self._channel, self._metadata = channel, metadata
        self._questions = asyncio.Semaphore(QUESTIONS)
        self._asked: deque[Asked] = deque()
        self._news = asyncio.Event()

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        asked = Asked(request, asyncio.get_running_loop().create_future())
        self._ask([asked])
        return await asked.answer

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        async with self._questions:
            while True:
                call = getattr(stub(self._channel), method)(request, metadata=(*self._metadata, *metadata))
                try:
                    answer = await call
                except aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise request_failed(error) from None
                    self._away(error)
                    await asyncio.sleep(PAUSE)
                else:
                    self._patience.answered()
                    return answer

    def _ask(self, asked: list[Asked]) -> None:
        self._asked.extend(asked)
        self._news.set()

    async def work(self) -> None:
        """Sends what was asked, until cancelled."""
        await asyncio.gather(*(self._call_after_call() for _ in range(CALLS)))

    async def _call_after_call(self) -> None:
        while True:
            call = await self._collect()
            try:
                await self._send(call)
                _fail(call, RequestFailed("INTERNAL", "NOT_ANSWERED", "the server left this entry of a batch out"))
            except aio.AioRpcError as error:
                await self._failed([asked for asked in call if not asked.answer.done()], error)
            except Exception as error:  # a bug: whoever waits shall hear of it
                _fail(call, error)

    async def _collect(self) -> list[Asked]:
        """The next call: what waits, as far as it fits."""
        while not self._asked:
            self._news.clear()
            await self._news.wait()
        call, size = [self._asked.popleft()], 0
        while self._asked and len(call) < CALL_ENTRIES and not (call[-1].alone or self._asked[0].alone):
            size += call[-1].request.ByteSize() + 8  # its tag and length
            if size + self._asked[0].request.ByteSize() > CALL_BYTES:
                break
            call.append(self._asked.popleft())
        return call

    async def _send(self, call: list[Asked]) -> None:
        message = pb.BatchGenerateRequest(requests=[asked.request for asked in call])
        async for entry in self._stub.BatchGenerate(message, metadata=self._metadata):
            self._patience.answered()
            answer = call[entry.position].answer
            if answer.done():  # cancelled: the job is ending
                continue
            if entry.WhichOneof("outcome") == "response":
                answer.set_result(entry.response)
            else:
                answer.set_exception(failure_of(entry.error))

    async def _failed(self, left: list[Asked], error: aio.AioRpcError) -> None:
        """Of a call as a whole: a server that is away is waited for, a call that it does not take is taken apart."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            try:
                self._away(error)
            except JobStoppedError as stopped:
                _fail(left, stopped)
            self._ask([asked for asked in left if not asked.answer.done()])
            await asyncio.sleep(PAUSE)
        elif len(left) == 1:
            _fail(left, request_failed(error))
        else:
            self._ask([Asked(asked.request, asked.answer, alone=True) for asked in left])

    def _away(self, error: aio.AioRpcError) -> None:
        """Raises JobStoppedError where the server has been away for too long."""
        self._patience.away(f"{self._server} does not answer: {error.details()}")


def _fail(call: list[Asked], error: Exception) -> None:
    for asked in call:
        if not asked.answer.done():
            asked.answer.set_exception(error)


@asynccontextmanager
async def server_runner(server: str, patience: Patience, security: Security = OPEN) -> AsyncIterator[ServerRunner]:
    """Runs requests on a server. Raises QuireError where the server does not answer, or does not take requests."""
    async with security.aio_channel(server, OPTIONS) as channel:
        await _check_server(channel, server, security.metadata)
        runner = ServerRunner(channel, server, patience, security.metadata)
        work = asyncio.create_task(runner.work())
        try:
            yield runner
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def _check_server(channel: aio.Channel, server: str, metadata: Metadata) -> None:
    """Asks the server what it serves. A refused connection ends this at once, unlike one that is slow.

    Raises:
        QuireError: No server answers, or it refuses such questions. A server that is full, has no engine yet or is
            shutting down answers: the job waits for it.
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


def request_failed(error: grpc.RpcError) -> RequestFailed:
    """Returns the failure of a call as a whole."""
    failure = call_failure(error)
    message = failure.message + message_hint(failure.message)
    reason, field = failure.reason or CALL_FAILED, failure.field.removeprefix("spec.")
    return RequestFailed(failure.code.name, reason, message, field, failure.retry_after)


def failure_of(error: pb.EntryError) -> RequestFailed:
    """What a failed entry of a batch says, as `rpc.status` put it."""
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
