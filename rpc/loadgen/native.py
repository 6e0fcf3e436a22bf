"""Client of a load over quire.v1."""

import time
from typing import Any

import grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc
from quire.v1 import tokenization_service_pb2 as tokenization_pb
from quire.v1 import tokenization_service_pb2_grpc as tokenization_pb_grpc

from rpc.client.errors import sentence
from rpc.client.failures import failure_of
from rpc.client.resuming_async import END
from rpc.client.security import Security
from rpc.loadgen.corpus import Corpus
from rpc.loadgen.observation import Observation
from rpc.loadgen.wire import Connections, Failed, LoadRequest, ServedModel

FINISH_REASONS = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in pb.FinishReason.items() if number
}
API = "quire.v1"
OTHER_PORT = (
    "Is it another port, or for another --protocol? The gRPC port is 50051, the admin port 50052, "
    "unless the server has other ones"
)
PIECE = 4096  # characters that every server tokenizes in one call
ENOUGH = 2**17  # tokens to cut prompts from


class Native:
    """Client over quire.v1, without retries: a refusal counts as a failure.

    Args:
        server: HOST:PORT.
        model: Name of the model; "" is the only one.
        security: Token and certificates.
        ignore_eos: Whether outputs go on past the model's end.
    """

    def __init__(self, server: str, model: str, security: Security, ignore_eos: bool) -> None:
        self._server, self._model, self._ignore_eos = server, model, ignore_eos
        self._metadata = security.metadata
        self._connections = Connections(server, security)

    async def find(self) -> ServedModel:
        answer = await self._call(model_pb_grpc.ModelServiceStub, "ListModels", model_pb.ListModelsRequest())
        found = [model for model in answer.models if self._model in ("", model.name)]
        if not found:
            raise Failed("NOT_FOUND", f"--model {self._model} is not served, {[m.name for m in answer.models]} are")
        return ServedModel(found[0].name, found[0].max_model_length)

    async def corpus(self, text: str) -> Corpus:
        """Returns the text in tokens of the server's tokenizer. Raises Failed."""
        ids: list[int] = []
        for start in range(0, len(text), PIECE):
            request = tokenization_pb.TokenizeRequest(
                model=self._model, text=text[start : start + PIECE], add_special_tokens=False
            )
            answer = await self._call(tokenization_pb_grpc.TokenizationServiceStub, "Tokenize", request)
            ids += answer.token_ids
            if len(ids) >= ENOUGH:
                break
        return Corpus(ids)

    async def send(self, request: LoadRequest, seen: Observation) -> None:
        spec = pb.GenerationSpec(
            model=self._model,
            sampling=pb.SamplingParameters(seed=request.number),
            stopping=pb.StoppingCriteria(max_tokens=request.output, ignore_eos=self._ignore_eos),
        )
        if isinstance(request.prompt, str):
            spec.text = request.prompt
        else:
            spec.token_ids.ids.extend(request.prompt)
        with self._connections.lease() as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), metadata=self._metadata)
            seen.sent = time.monotonic()
            try:
                await self.read(call, seen)
            except grpc.RpcError as error:
                raise failed(error, self._server, API) from None
            finally:
                call.cancel()

    async def read(self, call: Any, seen: Observation) -> None:
        """Records all messages of a call of StreamGenerate. Raises Failed, grpc.RpcError."""
        while (message := await call.read()) is not END:
            now = time.monotonic()
            tokens = 0
            for delta in message.deltas:
                if delta.first_position != seen.tokens:
                    raise Failed("DATA_LOSS", f"token {delta.first_position} came where {seen.tokens} was due")
                tokens += delta.token_count
                if delta.finish_reason:
                    seen.finish = FINISH_REASONS.get(delta.finish_reason, str(delta.finish_reason))
            if tokens:
                seen.times.append(now)
                seen.tokens += tokens
            if message.HasField("usage"):
                seen.prompt_tokens = message.usage.prompt_tokens
                seen.cached_tokens = message.usage.cached_prompt_tokens

    async def _call(self, stub: Any, method: str, request: Any) -> Any:
        with self._connections.lease() as channel:
            try:
                return await getattr(stub(channel), method)(request, metadata=self._metadata)
            except grpc.RpcError as error:
                raise failed(error, self._server, API) from None

    async def close(self) -> None:
        await self._connections.close()


def failed(error: grpc.RpcError, server: str, api: str) -> Failed:
    """Returns the failure of a call of `api` to `server`. Its code has Quire's reason, if there is one."""
    failure = failure_of(error)
    if failure.code is grpc.StatusCode.UNIMPLEMENTED and not failure.reason:  # from gRPC itself
        return Failed(failure.code.name, f"{server} does not serve {api}. {OTHER_PORT}")
    code = f"{failure.code.name} {failure.reason}".strip()
    return Failed(code, sentence(failure, server).removeprefix(f"{failure.code.name}: "))
