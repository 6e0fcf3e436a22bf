"""Client of a load over the Open Inference Protocol with Triton's extensions: ModelStreamInfer of a text model.

Prompts are text, so their lengths are approximate: the server is asked once for the tokens of a word. Reports use the
server's own counts, if it gives them like Triton's vLLM backend.
"""

import json
import struct
import time
from typing import Any

import grpc

from rpc.client.resuming_async import END
from rpc.client.security import Security
from rpc.loadgen.corpus import Corpus, corpus_of_words
from rpc.loadgen.native import failed
from rpc.loadgen.observation import Observation
from rpc.loadgen.wire import Connections, Failed, LoadRequest, ServedModel
from rpc.services.inference import pb
from rpc.services.inference.tensors import join

API = "inference.GRPCInferenceService"
SERVICE = f"/{API}/"
RETURNED = ("finish_reason", "num_input_tokens", "num_output_tokens")
FLAGS = ("stream", "exclude_input_in_output", *(f"return_{name}" for name in RETURNED))
RUNNING = "None"  # finish reason of a running request: Python's None as text


class OpenInference:
    """Client over the Open Inference Protocol, with a call for each request.

    Args:
        server: HOST:PORT.
        model: Name of the model; the protocol has no list of models.
        security: Token and certificates.
        ignore_eos: Whether outputs go on past the model's end.
    """

    def __init__(self, server: str, model: str, security: Security, ignore_eos: bool) -> None:
        self._server, self._model, self._ignore_eos = server, model, ignore_eos
        self._metadata = security.metadata
        self._connections = Connections(server, security)

    async def find(self) -> ServedModel:
        if not self._model:
            raise Failed("NOT_FOUND", "--protocol inference needs --model: the protocol has no list of models")
        with self._connections.lease() as channel:
            ready = channel.unary_unary(
                SERVICE + "ModelReady",
                request_serializer=pb.ModelReadyRequest.SerializeToString,
                response_deserializer=pb.ModelReadyResponse.FromString,
            )
            try:
                answer = await ready(pb.ModelReadyRequest(name=self._model), metadata=self._metadata)
            except grpc.RpcError as error:
                raise failed(error, self._server, API) from None
        if not answer.ready:
            raise Failed("NOT_FOUND", f"--model {self._model} is not ready at {self._server}")
        return ServedModel(self._model)

    async def corpus(self, text: str) -> Corpus:
        async def count(prompt: str) -> int:
            seen = Observation(0.0, (0, 1))
            await self.send(LoadRequest(0, prompt, 0, 1), seen)
            return seen.prompt_tokens

        return await corpus_of_words(text, count)

    async def send(self, request: LoadRequest, seen: Observation) -> None:
        message = self._message(request)
        with self._connections.lease() as channel:
            infer: Any = channel.stream_stream(
                SERVICE + "ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )
            call: Any = infer(metadata=self._metadata)
            seen.sent = time.monotonic()
            try:
                await call.write(message)
                await call.done_writing()
                while (answer := await call.read()) is not END:
                    record_message(answer, seen)
            except grpc.RpcError as error:
                raise failed(error, self._server, API) from None
            finally:
                call.cancel()

    def _message(self, request: LoadRequest) -> pb.ModelInferRequest:
        parameters = {"max_tokens": request.output, "ignore_eos": self._ignore_eos, "seed": request.number}
        message = pb.ModelInferRequest(model_name=self._model, id=str(request.number))
        texts = {"text_input": str(request.prompt), "sampling_parameters": json.dumps(parameters)}
        for name, text in texts.items():
            message.inputs.add(name=name, datatype="BYTES", shape=[1])
            message.raw_input_contents.append(join("BYTES", [text.encode()]))
        for name in FLAGS:
            message.inputs.add(name=name, datatype="BOOL", shape=[1])
            message.raw_input_contents.append(b"\1")
        return message

    async def close(self) -> None:
        await self._connections.close()


def record_message(answer: pb.ModelStreamInferResponse, seen: Observation) -> None:
    """Records one message. Raises Failed for an error message."""
    now, parts = time.monotonic(), answer.infer_response
    if answer.error_message:
        code = parts.parameters["quire_error_code"].string_param or "ERROR"
        reason = parts.parameters["quire_error_reason"].string_param
        raise Failed(f"{code} {reason}".strip(), answer.error_message)
    places = {output.name: i for i, output in enumerate(parts.outputs)}
    if "num_input_tokens" in places:
        seen.prompt_tokens = _number(parts, places["num_input_tokens"])
    if "finish_reason" in places and (finish := _text(parts, places["finish_reason"])) != RUNNING:
        seen.finish = finish.lower()
    tokens = _number(parts, places["num_output_tokens"]) if "num_output_tokens" in places else int(bool(parts.outputs))
    if tokens:
        seen.times.append(now)
        seen.tokens += tokens


def _text(answer: pb.ModelInferResponse, place: int) -> str:
    """Returns the only element of a tensor of BYTES, raw or typed. Raises Failed."""
    if place < len(answer.raw_output_contents):
        raw = answer.raw_output_contents[place]
        if len(raw) >= 4 and len(raw) == 4 + int(struct.unpack_from("<I", raw)[0]):
            return bytes(raw[4:]).decode(errors="replace")
    elif len(answer.outputs[place].contents.bytes_contents) == 1:
        return bytes(answer.outputs[place].contents.bytes_contents[0]).decode(errors="replace")
    raise Failed("BAD_ANSWER", f"{answer.outputs[place].name} is not one string")


def _number(answer: pb.ModelInferResponse, place: int) -> int:
    """Returns the only element of a tensor of UINT32, raw or typed. Raises Failed."""
    if place < len(answer.raw_output_contents):
        raw = answer.raw_output_contents[place]
        if len(raw) == 4:
            return int(struct.unpack("<I", raw)[0])
    elif len(answer.outputs[place].contents.uint_contents) == 1:
        return int(answer.outputs[place].contents.uint_contents[0])
    raise Failed("BAD_ANSWER", f"{answer.outputs[place].name} is not one UINT32")
