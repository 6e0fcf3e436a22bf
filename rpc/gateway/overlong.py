"""Words errors as OpenAI does if a prompt and its output do not fit in the model's context.

litellm, langchain and others search for these words, and some for the numbers in them.
"""

import re

import grpc
from quire.v1 import generation_service_pb2 as pb

from rpc.client.failures import Failure
from scheduler.bounds import message_bytes, most_bytes
from scheduler.invalid import InvalidRequest

TOO_LARGE = "larger than max"  # gRPC's words for a message above a limit, from client and server
CODE = "context_length_exceeded"
PROMPT = re.compile(r"[\w.\[\]]+ is '(?:token )?(\d+)(?: of the images| tokens)': prompt and output must fit in (\d+)")
BYTES = re.compile(r"[\w.]+ is '(\d+) bytes': at most (\d+) bytes for (\d+) tokens")
OUTPUT = re.compile(r"[\w.]+ is (\d+): at most (\d+) fit after (\d+) prompt tokens")


def openais_words(message: str, output: int | None) -> str | None:
    """Returns OpenAI's sentences for a server's refusal; None if it refuses for another reason.

    Args:
        message: The server's message.
        output: Number of output tokens that the request wants.
    """
    if found := PROMPT.match(message):
        prompt, context = map(int, found.groups())
        return _sentences(context, prompt, output or 1)
    if found := OUTPUT.match(message):
        asked, room, prompt = map(int, found.groups())
        return _sentences(prompt + room, prompt, asked)
    if found := BYTES.match(message):
        size, most, context = map(int, found.groups())
        return f"{_context(context)} However, your prompt has {size} bytes, and at most {most} are read for that."
    return None


def for_prompt(failure: Failure, spec: pb.GenerationSpec, context: int) -> Failure:
    """Replaces gRPC's refusal of a message by the server's refusal of its prompt, if the prompt is too long.

    gRPC drops a message above the server's --max-message-bytes before the server checks the prompt.

    Args:
        failure: The call's failure. It is returned as it is if gRPC did not refuse the message, or the prompt can fit.
        spec: The call's request.
        context: Longest prompt + output that the model serves, in tokens.
    """
    if failure.reason or TOO_LARGE not in failure.message:
        return failure
    kind = spec.WhichOneof("prompt") or ""
    count, most = len(spec.token_ids.ids), min(most_bytes(context), message_bytes(context))
    if count >= context and not spec.HasField("prompt_truncation"):
        refused = InvalidRequest(kind, f"{count} tokens", f"prompt and output must fit in {context} tokens")
    elif (size := _text_bytes(spec)) > most:
        refused = InvalidRequest(kind, f"{size} bytes", f"at most {most} bytes for {context} tokens")
    else:
        return failure
    return Failure(grpc.StatusCode.INVALID_ARGUMENT, str(refused), "INVALID_FIELD", refused.field)


def _text_bytes(spec: pb.GenerationSpec) -> int:
    """Returns the bytes of the prompt's text, counted like `scheduler.bounds`; 0 for token ids."""
    chat = spec.chat
    texts = [spec.text, *chat.template_arguments, *chat.template_arguments.values()]
    texts += [message.role for message in chat.messages]
    texts += [part.text for message in chat.messages for part in message.parts]
    return sum(len(text.encode()) for text in texts)


def _sentences(context: int, prompt: int, output: int) -> str:
    return (
        f"{_context(context)} However, you requested {prompt + output} tokens ({prompt} in the prompt, {output} in the "
        "completion)."
    )


def _context(tokens: int) -> str:
    return f"This model's maximum context length is {tokens} tokens."
