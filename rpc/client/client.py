"""The synchronous client; threads may share it."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc
from quire.v1 import tokenization_service_pb2 as tokenization_pb
from quire.v1 import tokenization_service_pb2_grpc as tokenization_pb_grpc

from rpc.addresses import check_server
from rpc.client.channels import SyncChannels
from rpc.client.errors import error_of
from rpc.client.failures import failure_of
from rpc.client.resuming import Resuming
from rpc.client.security import OPEN, Metadata, Security
from rpc.client.specs import Prompt, spec_of
from rpc.client.tracing import trace_metadata
from rpc.client.tries import Tries

A = TypeVar("A")

DEFAULT_SERVER = "127.0.0.1:50051"
REFUSALS = 5


def servers_in(servers: str | Sequence[str]) -> list[str]:
    """Returns one address or several as a list.

    Raises:
        ValueError: An address is not of the form HOST:PORT.
    """
    listed = [servers] if isinstance(servers, str) else list(servers)
    for server in listed:
        check_server(server)
    return listed


class Client:
    """Client of one server, or of several: if one is lost, its calls go on at the next.

    Calls raise `QuireError`, and RuntimeError after `close`. Any thread may use the client; more than a hundred calls
    at once wait for each other.

    Args:
        servers: HOST:PORT, or several.
        security: Token and certificates.
        timeout: Seconds for a whole call that has no timeout of its own; None sets no limit.
        refusals: Waits of a call while the servers are full, each as long as a server says.

    Raises:
        ValueError: A server is not of the form HOST:PORT, or the token could be read on its way there.
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
        self._channels = SyncChannels(security)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; calls that have not ended are cancelled."""
        self._channels.close()

    def generate(
        self, prompt: Prompt, images: Sequence[bytes] = (), timeout: float | None = None, **options: Any
    ) -> pb.GenerateResponse:
        """Returns the whole result of one request.

        Args:
            prompt: Text, token ids or a conversation; see `spec_of`.
            images: PNG or JPEG files of a prompt of text or ids.
            timeout: Seconds for the call; None takes the client's.
            options: Fields of the request by name; see `spec_of`.
        """
        request = pb.GenerateRequest(spec=spec_of(prompt, images, **options))
        return self._call(pb_grpc.GenerationServiceStub, lambda stub: stub.Generate, request, timeout)

    def stream(
        self, prompt: Prompt, images: Sequence[bytes] = (), timeout: float | None = None, **options: Any
    ) -> "Stream":
        """Returns the deltas of one request as they come; arguments as for `generate`.

        If a server is lost, the next one goes on, and each token comes once.
        """
        return self.stream_request(pb.StreamGenerateRequest(spec=spec_of(prompt, images, **options)), timeout)

    def stream_request(self, request: pb.StreamGenerateRequest, timeout: float | None = None) -> "Stream":
        """Does the same as `stream` for a message of the API."""
        return Stream(Resuming(self._tries(timeout), request, self._channels.channel_to, self._metadata()))

    def tokenize(self, text: str, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """Returns the token ids of a text."""
        request = tokenization_pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        stub = tokenization_pb_grpc.TokenizationServiceStub
        answer = self._call(stub, lambda of: of.Tokenize, request, timeout)
        return list(answer.token_ids)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, timeout: float | None = None) -> str:
        """Returns the text of token ids."""
        request = tokenization_pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        answer = self._call(tokenization_pb_grpc.TokenizationServiceStub, lambda of: of.Detokenize, request, timeout)
        return str(answer.text)

    def models(self, timeout: float | None = None) -> list[model_pb.Model]:
        """Lists the models that the server serves."""
        request = model_pb.ListModelsRequest()
        return list(self._call(model_pb_grpc.ModelServiceStub, lambda of: of.ListModels, request, timeout).models)

    def _metadata(self) -> Metadata:
        """Returns the metadata of a call that starts now: token and current trace."""
        return (*self._security.metadata, *trace_metadata())

    def _tries(self, timeout: float | None) -> Tries:
        return Tries(self._servers, self._timeout if timeout is None else timeout, self._refusals)

    def _call(
        self, stub: Callable[[grpc.Channel], Any], method: Callable[[Any], Any], request: Any, timeout: float | None
    ) -> Any:
        """Makes a unary call. A failed one leaves nothing behind, so it is tried again as a whole."""
        tries = self._tries(timeout)
        while True:
            left = tries.begin()
            call = method(stub(self._channels.channel_to(tries.server)))
            try:
                return call(request, timeout=left, metadata=self._metadata())
            except grpc.RpcError as error:
                pause = tries.pause(failure_of(error))
                if pause is None:
                    raise error_of(error, tries.server) from None
                time.sleep(pause)


class Stream:
    """Messages of one StreamGenerate: iterate over them, or over `text()`.

    Leaving its context cancels the rest.
    """

    def __init__(self, resuming: Resuming) -> None:
        self._resuming = resuming
        self._messages = resuming.messages()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._messages.close()

    def __iter__(self) -> Iterator[pb.StreamGenerateResponse]:
        return self

    def __next__(self) -> pb.StreamGenerateResponse:
        try:
            return next(self._messages)
        except grpc.RpcError as error:
            raise error_of(error, self._resuming.server) from None

    @property
    def server(self) -> str:
        """HOST:PORT of the server that was asked last."""
        return self._resuming.server

    def text(self) -> Iterator[str]:
        """Yields the text of the first sequence, piece by piece."""
        for message in self:
            yield from (delta.text for delta in message.deltas if delta.index == 0 and delta.text)

    def cancel(self) -> None:
        """Cancels the request, from any thread; its reader gets `CancelledError`."""
        self._resuming.cancel()
