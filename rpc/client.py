"""Client side of quire.v1 for the command line: streams one request's text. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from quire.v1 import generation_service_pb2 as pb

from rpc.resuming import Resuming


class CallFailed(RuntimeError):
    """A call that did not succeed, as a sentence for a person."""


def stream_text(
    servers: Sequence[str],
    prompt: str,
    model: str,
    sampling: Mapping[str, Any],
    stopping: Mapping[str, Any],
    timeout: float | None,
    show: Callable[[str], object],
    chat: bool = False,
    images: Sequence[bytes] = (),
) -> str:
    """Calls StreamGenerate and hands each piece of text to `show`. servers: HOST:PORT; where one is lost, the next one
    goes on. sampling, stopping: fields of the messages. chat: the images and the prompt are the one message, of a user,
    of a conversation.

    Returns a summary line. Raises CallFailed.
    """
    request = pb.StreamGenerateRequest(
        spec=pb.GenerationSpec(
            model=model,
            sampling=pb.SamplingParameters(**sampling),
            stopping=pb.StoppingCriteria(**stopping),
        )
    )
    if chat:
        parts = [pb.ContentPart(image=pb.Image(data=image)) for image in images]
        request.spec.chat.messages.add(role="user", parts=[*parts, pb.ContentPart(text=prompt)])
    else:
        request.spec.text = prompt
        request.spec.images.extend(pb.Image(data=image) for image in images)
    usage, reason, seed = pb.Usage(), pb.FINISH_REASON_UNSPECIFIED, 0
    stream = Resuming(servers, request, timeout)
    try:
        for message in stream.messages():
            seed = message.prompt_info.seed or seed
            for delta in message.deltas:
                show(delta.text)
                reason = delta.finish_reason or reason
            usage = message.usage
    except grpc.RpcError as error:
        raise CallFailed(explain(error, stream.server)) from None
    ended = pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return f"{usage.prompt_tokens} prompt + {usage.completion_tokens} generated tokens, {ended}, seed {seed}"


def explain(error: grpc.RpcError, server: str) -> str:
    """The failure of a call as a sentence for a person."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAVAILABLE and "onnect" in (details or ""):
        return f"no server answers at {server}. Start one with `make serve`, or name another with --server"
    return f"{code.name}: {details}{message_hint(details)}"


def message_hint(details: str | None) -> str:
    """What helps where a request message was too large for a server, which says it in gRPC's words."""
    return "; the server's --max-message-bytes is the limit" if "larger than max" in (details or "") else ""
