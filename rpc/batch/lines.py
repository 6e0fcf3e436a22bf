"""Quire's own form of a line: JSON to a request of the public API, its response or failure back to JSON.

`sampling`, `stopping` and `output` are parsed as the proto's messages of these names. So field names, types and errors
are those of every other client.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.batch.conversations import CONVERSATION, parse_object, set_chat
from rpc.batch.images import NamedFile, set_image
from rpc.batch.line import OPENAI_KEYS, Answering, Line, Outcome
from rpc.client.structured_output import structured_of
from rpc.frontend.errors import RequestFailed, internal, invalid
from scheduler.invalid import InvalidRequest

PROMPTS = ("prompt", "prompt_token_ids", "messages")
PARAMETERS = ("sampling", "stopping", "output")
KEYS = ("id", *PROMPTS, *CONVERSATION, "images", *PARAMETERS, "structured_output")


@dataclass(frozen=True, slots=True)
class OwnLine(Line):
    """A line of Quire's own form.

    Attributes:
        request: The request; None if the line is wrong.
        failure: Error of a line without a request.
        files: Images of the request that are still to be read.
    """

    request: pb.GenerateRequest | None = None
    failure: RequestFailed | None = None
    files: tuple[NamedFile, ...] = ()

    def read_files(self) -> None:
        """Reads the image files into the request. Raises RequestFailed."""
        for file in self.files:
            file.read()

    async def run(self, answering: Answering) -> Outcome:
        if self.request is None:
            raise self.failure or internal()
        if self.files:
            await asyncio.to_thread(self.read_files)
        response = await answering.run(self.request)
        usage = response.usage
        return Outcome(result_line(self, response), False, usage.prompt_tokens, usage.completion_tokens)

    def failed(self, failure: RequestFailed) -> str:
        return failure_line(self, failure)


def parse_line(index: int, number: int, data: bytes, folder: Path = Path()) -> OwnLine:
    """Parses a line. A wrong line does not raise: it has its failure.

    Args:
        index: Number among lines that are not blank, from 0.
        number: Number in the file, from 1.
        data: Bytes of the line.
        folder: Folder of the files that the line names.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        return OwnLine(index, number, number, failure=_bad_line(f"line {number} is no JSON: {error}"))
    if not isinstance(values, dict):
        return OwnLine(index, number, number, failure=_bad_line(f"line {number} is no JSON object"))
    if not values.keys().isdisjoint(OPENAI_KEYS):
        mixed = f"line {number} is in OpenAI's form, the file is in Quire's, and a file mixes no forms"
        return OwnLine(index, number, number, failure=_bad_line(mixed))
    name = values.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        return OwnLine(index, number, number, failure=_bad("id", name, "must be a string or a whole number"))
    try:
        request, files = _request(values, folder)
        return OwnLine(index, number, name, request=request, files=files)
    except InvalidRequest as error:
        return OwnLine(index, number, name, failure=invalid(error))
    except RequestFailed as failure:
        return OwnLine(index, number, name, failure=failure)


def _bad(field: str, value: object, reason: str) -> RequestFailed:
    return invalid(InvalidRequest(field, value, reason))


def _bad_line(message: str) -> RequestFailed:
    return RequestFailed("INVALID_ARGUMENT", "INVALID_LINE", message, field="line")


def _request(values: dict[str, Any], folder: Path) -> tuple[pb.GenerateRequest, tuple[NamedFile, ...]]:
    """Returns the request, and its image files that are still to be read. Raises RequestFailed, InvalidRequest."""
    for key in values:
        if key not in KEYS:
            raise _bad(key, values[key], f"is not known here; a line has {', '.join(KEYS)}")
    given = [key for key in PROMPTS if key in values]
    if len(given) != 1:
        raise _bad_line(f"there must be exactly one of {', '.join(PROMPTS)}; there is {', '.join(given) or 'none'}")
    request = pb.GenerateRequest()
    spec, files = request.spec, list[NamedFile | None]()
    for key in CONVERSATION:
        if key in values and given != ["messages"]:
            raise _bad(key, values[key], "needs messages")
    match given[0]:
        case "prompt":
            _set_text(spec, values["prompt"])
        case "prompt_token_ids":
            _set_ids(spec, values["prompt_token_ids"])
        case _:
            files = set_chat(spec.chat, values, folder)
    if "images" in values:
        files += _set_images(spec, values["images"], folder)
    spec.output.token_ids = True
    for key in PARAMETERS:
        if key in values:
            parse_object(values[key], getattr(spec, key), key)
    if "structured_output" in values:
        _set_structured(spec, values["structured_output"])
    return request, tuple(file for file in files if file is not None)


def _set_text(spec: pb.GenerationSpec, prompt: object) -> None:
    if not isinstance(prompt, str):
        raise _bad("prompt", prompt, "must be a string")
    try:
        spec.text = prompt
    except ValueError:
        raise _bad("prompt", prompt, "is no Unicode text") from None


def _set_ids(spec: pb.GenerationSpec, ids: object) -> None:
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or not all(0 <= i < 2**32 for i in ids):  # type: ignore[attr-defined]
        raise _bad("prompt_token_ids", ids, "must be a list of token ids")
    spec.token_ids.ids.extend(ids)  # type: ignore[arg-type]


def _set_images(spec: pb.GenerationSpec, images: object, folder: Path) -> list[NamedFile | None]:
    if not isinstance(images, list):
        raise _bad("images", images, "must be a list of images")
    return [set_image(spec.images.add(), image, f"images[{i}]", folder) for i, image in enumerate(images)]


def _set_structured(spec: pb.GenerationSpec, value: Any) -> None:
    try:
        spec.structured_output.CopyFrom(structured_of(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad("structured_output", value, str(error)) from None


def result_line(line: OwnLine, response: pb.GenerateResponse) -> str:
    """Returns a result's line of JSON, without its end."""
    usage = {
        "prompt_tokens": response.usage.prompt_tokens,
        "cached_prompt_tokens": response.usage.cached_prompt_tokens,
        "completion_tokens": response.usage.completion_tokens,
    }
    searched = line.request is not None and line.request.spec.sampling.HasField("beam_search")
    sequences = [_sequence(sequence, searched) for sequence in response.sequences]
    if len(sequences) != 1:
        return json.dumps({"id": line.id, "sequences": sequences, "usage": usage})
    (only,) = sequences
    logprobs = {"logprobs": only.pop("logprobs")} if "logprobs" in only else {}  # the longest comes last
    return json.dumps({"id": line.id, **only, "usage": usage, **logprobs})


def _sequence(sequence: pb.SequenceResult, searched: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": sequence.text,
        "token_ids": list(sequence.token_ids),
        "finish_reason": pb.FinishReason.Name(sequence.finish_reason).removeprefix("FINISH_REASON_").lower(),
    }
    if sequence.reasoning:
        values["reasoning"] = sequence.reasoning
    if sequence.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in sequence.tool_calls
        ]
    if searched:
        values["score"] = sequence.score
    if sequence.logprobs:
        values["logprobs"] = [
            [{"token_id": t.token_id, "logprob": t.logprob, "rank": t.rank} for t in position.tokens]
            for position in sequence.logprobs
        ]
    return values


def failure_line(line: OwnLine, failure: RequestFailed) -> str:
    """Returns a failure's line of JSON, without its end."""
    error = {"code": failure.code, "reason": failure.reason, "message": failure.message}
    return json.dumps({"id": line.id, "error": error})
