"""The client for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc
from quire.v1 import tokenization_service_pb2 as tokenization_pb
from quire.v1 import tokenization_service_pb2_grpc as tokenization_pb_grpc

from rpc.client.client import DEFAULT_SERVER, REFUSALS, servers_in
from rpc.client.errors import CancelledError, error_of
from rpc.client.failures import Failure, failure_of
from rpc.client.resuming_async import AsyncResuming, Channels
from rpc.client.security import OPEN, Metadata, Security
from rpc.client.specs import Prompt, spec_of
from rpc.client.tracing import trace_metadata
from rpc.client.tries import Tries


class AsyncClient:
    """`Client` for one asyncio loop, with any number of calls at once. A cancelled task cancels its call.

    Args:
        servers: HOST:PORT, or several.
        security: Token and certificates.
        timeout: Seconds for a whole call that has no timeout of its own; None sets no limit.
        refusals: Waits of a call while the servers are full, each as long as a server says.

    Raises:
        ValueError: A server is not of the form HOST:PORT.
    """

    def __init__(
        self,
        servers: str | Sequence[str] = DEFAULT_SERVER,
        security: Security = OPEN,
        timeout: float | None = None,
        refusals: int = REFUSALS,
    ) -> None:
        self._servers = servers_in(servers)
        self._security, self._timeout, self._refusals = security, timeout, refusals
        self._channels = Channels(security)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections. Calls that have not ended are cancelled and raise this package's `CancelledError`."""
        await self._channels.close()

    async def generate(
        self, prompt: Prompt, images: Sequence[bytes] = (), timeout: float | None = None, **options: Any
    ) -> pb.GenerateResponse:
        """Returns the whole result of one request; arguments as for `Client.generate`."""
        request = pb.GenerateRequest(spec=spec_of(prompt, images, **options))
        return await self._call(pb_grpc.GenerationServiceStub, lambda stub: stub.Generate, request, timeout)

    def stream(
        self, prompt: Prompt, images: Sequence[bytes] = (), timeout: float | None = None, **options: Any
    ) -> "AsyncStream":
        """Returns the deltas of one request as they come; arguments as for `generate`.

        If a server is lost, the next one goes on, and each token comes once.
        """
        return self.stream_request(pb.StreamGenerateRequest(spec=spec_of(prompt, images, **options)), timeout)

    def stream_request(self, request: pb.StreamGenerateRequest, timeout: float | None = None) -> "AsyncStream":
        """Does the same as `stream` for a message of the API."""
        return AsyncStream(AsyncResuming(self._channels, self._tries(timeout), request, self._metadata()))

    async def tokenize(self, text: str, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """Returns the token ids of a text."""
        request = tokenization_pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        stub = tokenization_pb_grpc.TokenizationServiceStub
        answer = await self._call(stub, lambda of: of.Tokenize, request, timeout)
        return list(answer.token_ids)

    async def detokenize(
        self, ids: Sequence[int], skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        """Returns the text of token ids."""
        request = tokenization_pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        stub = tokenization_pb_grpc.TokenizationServiceStub
        answer = await self._call(stub, lambda of: of.Detokenize, request, timeout)
        return str(answer.text)

    async def models(self, timeout: float | None = None) -> list[model_pb.Model]:
        """Lists the models that the server serves."""
        request = model_pb.ListModelsRequest()
        answer = await self._call(model_pb_grpc.ModelServiceStub, lambda of: of.ListModels, request, timeout)
        return list(answer.models)

    def _metadata(self) -> Metadata:
        """Returns the metadata of a call that starts now: token and current trace."""
        return (*self._security.metadata, *trace_metadata())

    def _tries(self, timeout: float | None) -> Tries:
        return Tries(self._servers, self._timeout if timeout is None else timeout, self._refusals)

    async def _call(
        self, stub: Callable[[aio.Channel], Any], method: Callable[[Any], Any], request: Any, timeout: float | None
    ) -> Any:
        """Makes a unary call. A failed one leaves nothing behind, so it is tried again as a whole."""
        tries = self._tries(timeout)
        while True:
            left = tries.begin()
            with self._channels.lease(tries.server) as channel:
                try:
                    return await method(stub(channel))(request, timeout=left, metadata=self._metadata())
                except grpc.RpcError as error:
                    pause = tries.pause(failure_of(error))
                    if pause is None:
                        raise error_of(error, tries.server) from None
                except asyncio.CancelledError:
                    raise _cancelled(tries.server) from None
            await asyncio.sleep(pause)


class AsyncStream:
    """Messages of one StreamGenerate: iterate over them, or over `text()`.

    Leaving its context cancels the rest.
    """

    def __init__(self, resuming: AsyncResuming) -> None:
        self._resuming = resuming
        self._messages = resuming.messages()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._messages.aclose()

    def __aiter__(self) -> AsyncIterator[pb.StreamGenerateResponse]:
        return self

    async def __anext__(self) -> pb.StreamGenerateResponse:
        try:
            return await anext(self._messages)
        except grpc.RpcError as error:
            raise error_of(error, self._resuming.server) from None
        except asyncio.CancelledError:
            raise _cancelled(self._resuming.server) from None

    @property
    def server(self) -> str:
        """HOST:PORT of the server that was asked last."""
        return self._resuming.server

    async def text(self) -> AsyncIterator[str]:
        """Yields the text of the first sequence, piece by piece."""
        async for message in self:
            for delta in message.deltas:
                if delta.index == 0 and delta.text:
                    yield delta.text

    def cancel(self) -> None:
        """Cancels the request; its reader gets this package's `CancelledError`."""
        self._resuming.cancel()


def _cancelled(server: str) -> BaseException:
    """Returns the exception for a call that ended with asyncio.CancelledError.

    It stays that error if this task is being cancelled. Otherwise only the call was, and a `QuireError` says so.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return asyncio.CancelledError()
    return CancelledError(Failure(grpc.StatusCode.CANCELLED, "the call was cancelled, or its client closed"), server)
