"""Failures of calls as HTTP has them."""

import json

import grpc
import pytest
from grpc import aio
from grpc_status import rpc_status
from quire.v1 import generation_service_pb2 as pb

from rpc.client.failures import Failure, failure_of
from rpc.frontend.errors import RequestFailed, invalid
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.errors import LONGEST, ApiError, of_call, translated
from rpc.gateway.overlong import for_prompt
from rpc.gateway.parameters import names_of
from rpc.status import status_of
from scheduler.bounds import check_text
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Stopping
from scheduler.resolve import resolve
from scheduler.spec import Spec

LIMITS = Limits(vocabulary=100, context=128, pool_tokens=256, sequences=8)
NAMES = names_of(ChatRequest.model_validate({"messages": [{"role": "user", "content": "A"}]}))


def told(failure: RequestFailed, output: int | None = None) -> ApiError:
    """Returns the error that a client gets for a server's. output: tokens that were asked for."""
    status = rpc_status.to_status(status_of(failure))
    metadata = aio.Metadata(*((key, value) for key, value in status.trailing_metadata))
    return of_call(failure_of(aio.AioRpcError(status.code, aio.Metadata(), metadata, status.details)), NAMES, output)


def test_a_refused_value() -> None:
    message = "sampling.beam_search.width is 9: must be at least sampling.sequence_count, which is 12"
    error = told(RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", message, "sampling.beam_search.width"))
    assert json.loads(error.body) == {"error": {
        "message": "n is 9: must be at least n, which is 12", "type": "invalid_request_error", "param": "n",
        "code": "invalid_field",
    }}  # fmt: skip
    assert error.status == 400
    assert told(RequestFailed("INVALID_ARGUMENT", "NO_TOKEN_LEFT", "nothing", "sampling")).param is None


@pytest.mark.parametrize(
    "value", ["sampling.top_p", 'it\'s "sampling.top_p"', "a: sampling.top_p " * 9, "'" * 99 + ": "]
)
def test_a_clients_own_words_stay(value: str) -> None:
    said = InvalidRequest("stopping.stop[1]", value, "must not be sampling.min_p")
    error = told(invalid(said))
    assert error.message == str(said).replace("stopping.stop[1]", "stop[1]").replace("sampling.min_p", "min_p")
    assert told(RequestFailed("INVALID_ARGUMENT", "CHAT_FAILED", "sampling.min_p", "chat")).message == "sampling.min_p"


def test_who_has_no_template_has_another_path() -> None:
    error = told(RequestFailed("INVALID_ARGUMENT", "NO_CHAT_TEMPLATE", "send text or token_ids", "chat"))
    assert (error.param, error.code) == ("messages", "no_chat_template")
    assert error.message == "the model has no chat template: use /v1/completions"


def check(text: str, tokens: int, most: int | None) -> None:
    """As a server does."""
    check_text(text, LIMITS)
    resolve(Spec(text, stopping=Stopping(max_tokens=most)), [1] * tokens, LIMITS, ModelDefaults(), 0)


CONTEXT = "This model's maximum context length is 128 tokens. However, you"


@pytest.mark.parametrize(
    ("prompt", "tokens", "most", "param", "says"),
    [
        (
            "a",
            200,
            None,
            "prompt",
            f"{CONTEXT} requested 201 tokens (200 in the prompt, 1 in the completion). ",
        ),
        ("a", 200, 16, "prompt", f"{CONTEXT} requested 216 tokens (200 in the prompt, 16 in the completion). "),
        (
            "a",
            50,
            100,
            "max_tokens",
            f"{CONTEXT} requested 150 tokens (50 in the prompt, 100 in the completion). ",
        ),
        ("a" * 10**6, 1, None, "prompt", f"{CONTEXT}r prompt has 1000000 bytes, and at most 65536 are read for that. "),
    ],
)
def test_what_is_too_long_is_told_in_openais_words(
    prompt: str, tokens: int, most: int | None, param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(prompt, tokens, most)
    error = told(invalid(refused.value), most)
    assert (error.status, error.param, error.code) == (400, param, "context_length_exceeded")
    assert error.message.startswith(says)
    assert error.message.endswith(refused.value.reason)
    assert "context_length_exceeded: " in error.message, "langchain looks for the code there"


TOO_LARGE = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (90000 vs. 66560)")
PARTS = (pb.ContentPart(text="é" * 33_000), pb.ContentPart(image=pb.Image(data=b"a" * 9)))
CUT = pb.PromptTruncation()
BYTES = f"{CONTEXT}r prompt has %d bytes, and at most 65536 are read for that. "


@pytest.mark.parametrize(
    ("spec", "param", "says"),
    [
        (pb.GenerationSpec(text="a" * 70_000), "prompt", BYTES % 70_000),
        (pb.GenerationSpec(text="a" * 70_000, prompt_truncation=CUT), "prompt", BYTES % 70_000),
        (
            pb.GenerationSpec(chat=pb.Chat(messages=[pb.ChatMessage(role="user", parts=PARTS)])),
            "messages",
            BYTES % 66_004,
        ),
        (pb.GenerationSpec(chat=pb.Chat(template_arguments={"ab": "c" * 70_000})), "messages", BYTES % 70_002),
        (
            pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1] * 70_000)),
            "prompt",
            f"{CONTEXT} requested 70003 tokens (70000 in the prompt, 3 in the completion). ",
        ),
    ],
)
def test_a_prompt_that_no_message_takes_is_too_long(spec: pb.GenerationSpec, param: str, says: str) -> None:
    error = of_call(for_prompt(TOO_LARGE, spec, 128), NAMES, 3)
    assert (error.status, error.kind) == (400, "invalid_request_error")
    assert (error.param, error.code) == (param, "context_length_exceeded")
    assert error.message.startswith(says)


@pytest.mark.parametrize(
    ("failure", "spec"),
    [
        (TOO_LARGE, pb.GenerationSpec(text="a" * 65_536)),
        (TOO_LARGE, pb.GenerationSpec(text="a", images=[pb.Image(data=b"a" * 90_000)])),
        (TOO_LARGE, pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1] * 127))),
        (TOO_LARGE, pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1] * 70_000), prompt_truncation=CUT)),
        (Failure(grpc.StatusCode.UNAVAILABLE, "no server"), pb.GenerationSpec(text="a" * 70_000)),
        (Failure(grpc.StatusCode.INTERNAL, "larger than max", "REQUEST_FAULT"), pb.GenerationSpec(text="a" * 70_000)),
    ],
)
def test_what_else_fails_is_not_called_too_long(failure: Failure, spec: pb.GenerationSpec) -> None:
    assert for_prompt(failure, spec, 128) is failure


def test_a_long_context_takes_a_prompt_up_to_the_message_limit() -> None:
    spec, most = pb.GenerationSpec(text="a" * 900_000), 8 * 100_000 + 2**16
    assert for_prompt(TOO_LARGE, spec, 150_000) is TOO_LARGE, "the server's --max-message-bytes is lower than usual"
    assert f"has 900000 bytes, and at most {most} are" in of_call(for_prompt(TOO_LARGE, spec, 100_000), NAMES).message


def test_so_are_images() -> None:
    field = "chat.messages[0].parts[1].image"
    refused = InvalidRequest(field, "token 300 of the images", "prompt and output must fit in 128 tokens")
    error = told(invalid(refused))
    assert (error.param, error.code) == ("messages[0].content[1].image_url", "context_length_exceeded")
    assert error.message.startswith(f"{CONTEXT} requested 301 tokens")


@pytest.mark.parametrize(
    ("failure", "status", "kind", "param", "retry"),
    [
        (RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", "m", field="gpt"), 404, "invalid_request_error", "model", None),
        (RequestFailed("NOT_FOUND", "NO_SUCH_REPLICA", "m"), 404, "invalid_request_error", None, None),
        (RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", "m", retry_after=2.4), 429, "rate_limit_error", None, b"3"),
        (RequestFailed("UNAVAILABLE", "DRAINING", "m", retry_after=0.1), 503, "server_error", None, b"1"),
        (RequestFailed("INTERNAL", "REQUEST_FAULT", "m"), 500, "server_error", None, None),
        (RequestFailed("ALREADY_EXISTS", "REQUEST_ID_LIVE", "m"), 409, "invalid_request_error", None, None),
        (RequestFailed("UNAUTHENTICATED", "NO_TOKEN", "m"), 401, "authentication_error", None, None),
        (RequestFailed("PERMISSION_DENIED", "NOT_YOURS", "m"), 403, "permission_error", None, None),
    ],
)
def test_codes(failure: RequestFailed, status: int, kind: str, param: str | None, retry: bytes | None) -> None:
    error = told(failure)
    assert (error.status, error.kind, error.param, error.message) == (status, kind, param, "m")
    assert error.code == failure.reason.lower()
    assert dict(error.headers).get(b"retry-after") == retry
    assert (b"www-authenticate" in dict(error.headers)) == (status == 401)


@pytest.mark.parametrize(
    ("code", "message", "status"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to ipv4:10.0.0.4:50051", 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded at 10.0.0.4", 504),
        (grpc.StatusCode.CANCELLED, "10.0.0.4", 499),
        (grpc.StatusCode.UNKNOWN, "Traceback 10.0.0.4", 500),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "metadata of 10.0.0.4 exceeds", 500),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8) 10.0.0.4", 413),
    ],
)
def test_words_of_grpc_are_not_passed_on(code: grpc.StatusCode, message: str, status: int) -> None:
    error = of_call(Failure(code, message), NAMES)
    assert error.status == status
    assert "10.0.0.4" not in error.message


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("chat.messages[3].parts[2].image", "messages[3].content[2].image_url"),
        ("chat.messages[3].role", "messages[3].role"),
        ("chat.messages", "messages"),
        ("chat.template_arguments[mood]", "chat_template_kwargs[mood]"),
        ("stopping.stop[1]", "stop[1]"),
        ("stopping.stop_token_ids[7]", "stop_token_ids[7]"),
        ("texture", None),
        ("request_id", None),
    ],
)
def test_fields_by_their_longest_name(theirs: str, ours: str | None) -> None:
    assert translated(theirs, NAMES) == ours


def test_a_message_is_bounded() -> None:
    assert len(ApiError(400, "x" * 10**6).message) == LONGEST
