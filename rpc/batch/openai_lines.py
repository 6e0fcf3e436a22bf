"""OpenAI's form of a line: JSON to the gateway's request of an endpoint, its response or failure back to JSON.

Fields of a body, their checks and the form of a response are those of `rpc.gateway`.
"""

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from pydantic import ValidationError
from pydantic_core import from_json
from quire.v1 import generation_service_pb2 as pb

from rpc.batch.line import CALL_FAILED, OPENAI_KEYS, Answering, Line, Outcome
from rpc.client.failures import Failure
from rpc.frontend.errors import RequestFailed
from rpc.gateway.answers import ApiResponse
from rpc.gateway.chat import ChatResponse
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.completions import CompletionResponse
from rpc.gateway.errors import ApiError, of_call, of_validation
from rpc.gateway.parameters import names_of
from rpc.gateway.schema import CommonRequest

METHOD = "POST"
ENDPOINTS: dict[str, tuple[type[CommonRequest], type[ApiResponse]]] = {
    "/v1/completions": (CompletionRequest, CompletionResponse),
    "/v1/chat/completions": (ChatRequest, ChatResponse),
}
LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class BadLine(Line):
    """A line that is no request.

    Attributes:
        code: Error code for programs.
        message: Error message for people.
    """

    code: str
    message: str

    async def run(self, answering: Answering) -> Outcome:
        del answering
        error = {"code": self.code, "message": f"line {self.number}: {self.message}"}
        return Outcome(_output(self, None, error), failed=True)

    def failed(self, failure: RequestFailed) -> str:
        return _output(self, None, {"code": failure.reason.lower(), "message": failure.message})


@dataclass(frozen=True, slots=True)
class OpenAILine(Line):
    """A request of an endpoint.

    Attributes:
        body: The request, or the error of a wrong body.
        response: Class of the endpoint's responses.
    """

    body: CommonRequest | ApiError
    response: type[ApiResponse]

    async def run(self, answering: Answering) -> Outcome:
        try:
            if isinstance(self.body, ApiError):
                raise self.body
            made = self.response(self.body, answering.served, ())
            requests = [pb.GenerateRequest(spec=request.spec) for request in await made.begin()]
            responses = await self._responses(self.body, requests, answering)
            pieces = [
                piece
                for position, response in enumerate(responses)
                for piece in await made.pieces_of(position, streamed(response))
            ]
        except ApiError as error:
            return Outcome(_refusal(self, error), failed=True)
        whole = made.whole(pieces)
        usage = whole["usage"]
        text = _output(self, _response(200, responses[0].request_id, whole), None)
        return Outcome(text, False, usage["prompt_tokens"], usage["completion_tokens"])

    async def _responses(
        self, asked: CommonRequest, requests: Sequence[pb.GenerateRequest], answering: Answering
    ) -> list[pb.GenerateResponse]:
        """Runs all prompts at once. Raises ApiError, JobStoppedError."""
        ended = await asyncio.gather(*(answering.run(request) for request in requests), return_exceptions=True)
        responses = list[pb.GenerateResponse]()
        for position, end in enumerate(ended):
            if isinstance(end, RequestFailed):
                raise _api_error(end, names_of(asked, position))
            if isinstance(end, BaseException):
                raise end
            responses.append(end)
        return responses

    def failed(self, failure: RequestFailed) -> str:
        names = {} if isinstance(self.body, ApiError) else names_of(self.body)
        return _refusal(self, _api_error(failure, names))


def parse_openai_line(index: int, number: int, data: bytes, folder: Path = Path()) -> Line:
    """Parses a line. A wrong line does not raise: it is a `BadLine`, or has its error.

    Args:
        index: Number among lines that are not blank, from 0.
        number: Number in the file, from 1.
        data: Bytes of the line.
        folder: Unused: bodies name no files.
    """
    del folder
    try:
        values = from_json(data, allow_inf_nan=False)  # as the gateway reads a body: no lone surrogates, no NaN
    except ValueError as error:
        return BadLine(index, number, number, "invalid_json_line", f"is no JSON: {error}")
    if not isinstance(values, dict):
        return BadLine(index, number, number, "invalid_json_line", "is no JSON object")
    name, wrong = values.get("custom_id"), _wrong_form(values)
    if not isinstance(name, str):
        return BadLine(index, number, number, "invalid_line", wrong or f"custom_id is {_shown(name)}, must be a string")
    wrong = wrong or _wrong_values(values)
    if wrong is not None:
        return BadLine(index, number, name, "invalid_line", wrong)
    schema, answer = ENDPOINTS[values["url"]]
    return OpenAILine(index, number, name, _asked(schema, values["body"]), answer)


def _wrong_form(values: dict[str, Any]) -> str | None:
    if values.keys().isdisjoint(OPENAI_KEYS):
        return f"has none of {', '.join(OPENAI_KEYS)}: the file is in OpenAI's form, and a file mixes no forms"
    return None


def _wrong_values(values: dict[str, Any]) -> str | None:
    for key in values:
        if key not in OPENAI_KEYS:
            return f"{_shown(key)} is not known here; a line has {', '.join(OPENAI_KEYS)}"
    if values.get("method") != METHOD:
        return f"method is {_shown(values.get('method'))}, must be {METHOD!r}"
    url = values.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        return f"url is {_shown(url)}, must be {' or '.join(ENDPOINTS)}"
    if not isinstance(values.get("body"), dict):
        return f"body is {_shown(values.get('body'))}, must be an object"
    return None


def _asked(schema: type[CommonRequest], body: dict[str, Any]) -> CommonRequest | ApiError:
    try:
        asked = schema.model_validate(body)
    except ValidationError as error:
        return of_validation(error)
    except ApiError as error:
        return error
    if asked.stream:
        return ApiError(400, "stream is not supported in a batch", "stream", code="unsupported_parameter")
    return asked


def _api_error(failure: RequestFailed, names: dict[str, str]) -> ApiError:
    reason = "" if failure.reason == CALL_FAILED else failure.reason
    code = grpc.StatusCode[failure.code]
    return of_call(Failure(code, failure.message, reason, failure.field, failure.retry_after), names)


def streamed(response: pb.GenerateResponse) -> pb.StreamGenerateResponse:
    """Returns the result as the one message of a stream, without numbers of tokens."""
    message = pb.StreamGenerateResponse(
        request_id=response.request_id, prompt_info=response.prompt_info, usage=response.usage
    )
    for sequence in response.sequences:
        delta = message.deltas.add(
            index=sequence.index,
            text=sequence.text,
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            finish_reason=sequence.finish_reason,
            reasoning=sequence.reasoning,
        )
        for number, call in enumerate(sequence.tool_calls):
            delta.tool_calls.add(index=number, id=call.id, name=call.name, arguments=call.arguments)
        cause = sequence.WhichOneof("stop_cause")
        if cause is not None:
            setattr(delta, cause, getattr(sequence, cause))
    return message


def _refusal(line: Line, error: ApiError) -> str:
    """Returns the output's line of an error, in the form of the endpoint: an HTTP status and a body."""
    return _output(line, _response(error.status, "", json.loads(error.body)), None)


def _response(status: int, request_id: str, body: Any) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _output(line: Line, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    name = f"batch_req_{secrets.token_hex(12)}"
    return json.dumps({"id": name, "custom_id": line.id, "response": response, "error": error})


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
