"""Failures of calls as HTTP has them."""

import json

import grpc
import pytest
from grpc import aio
from grpc_status import rpc_status

from rpc.client.failures import Failure, failure_of
from rpc.frontend.errors import RequestFailed
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.errors import LONGEST, ApiError, of_call, translated
from rpc.gateway.parameters import names_of
from rpc.services.errors import status_of

NAMES = names_of(ChatRequest.model_validate({"messages": [{"role": "user", "content": "A"}]}))


def told(failure: RequestFailed) -> ApiError:
    """What is said of what a server says."""
    status = rpc_status.to_status(status_of(failure))
    metadata = aio.Metadata(*((key, value) for key, value in status.trailing_metadata))
    return of_call(failure_of(aio.AioRpcError(status.code, aio.Metadata(), metadata, status.details)), NAMES)


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
    ("failure", "status", "kind", "param", "retry"),
    [
        (RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", "m", field="gpt"), 404, "invalid_request_error", "model", None),
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
