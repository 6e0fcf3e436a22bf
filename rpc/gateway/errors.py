"""Failures in the form of OpenAI's API: an HTTP status and {"error": {message, type, param, code}}."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import grpc
from pydantic import ValidationError

from rpc.client.failures import Failure
from rpc.gateway.overlong import CODE as OVERLONG
from rpc.gateway.overlong import TOO_LARGE
from rpc.gateway.overlong import openais_words as overlong_words

LONGEST = 1000  # characters of a message
INVALID, SERVER = "invalid_request_error", "server_error"

STATUSES: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID),
    grpc.StatusCode.FAILED_PRECONDITION: (400, INVALID),
    grpc.StatusCode.OUT_OF_RANGE: (400, INVALID),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, INVALID),
    grpc.StatusCode.ALREADY_EXISTS: (409, INVALID),
    grpc.StatusCode.ABORTED: (409, SERVER),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.CANCELLED: (499, SERVER),
    grpc.StatusCode.UNIMPLEMENTED: (501, SERVER),
    grpc.StatusCode.UNAVAILABLE: (503, SERVER),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, SERVER),
}
"""Code of a failed call, to HTTP status and error type; other codes are 500."""

UNSAID = {
    grpc.StatusCode.UNAVAILABLE: "no server answers",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "a server, or what is on the way to it, has no room for the request",
    grpc.StatusCode.DEADLINE_EXCEEDED: "the request took longer than it may",
    grpc.StatusCode.UNAUTHENTICATED: "the server asks for a token: Authorization: Bearer TOKEN",
    grpc.StatusCode.PERMISSION_DENIED: "this token may not do that",
}
"""Code of a failed call, to the message for clients if no server gave a reason. gRPC's own texts can hold addresses."""


INSTEAD = {"NO_CHAT_TEMPLATE": "the model has no chat template: use /v1/completions"}
"""Reason of a failure, to the message that clients of HTTP get in place of the server's."""

LONGEST_VALUE = 60  # characters that a server shows of a value, with "..." where it had more
QUOTED = (r"'(?:[^'\\]|\\.)*'", r'"(?:[^"\\]|\\.)*"')


class ApiError(Exception):
    """A failure that a client gets as its response.

    Attributes:
        status: HTTP status.
        message: Text for people, at most `LONGEST` characters.
        param: The wrong field in the client's naming; None if no field is wrong.
        kind: OpenAI's error type.
        code: Error code for programs.
        retry_after: Seconds after which another try can help; None if none can.
        allow: HTTP methods of the path, with status 405.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        kind: str = INVALID,
        code: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.allow = allow
        self.status, self.param, self.kind, self.code, self.retry_after = status, param, kind, code, retry_after
        self.message = message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."

    @property
    def body(self) -> bytes:
        """JSON of the response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the response, but for its length."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def overloaded(message: str) -> ApiError:
    """Returns the error of a gateway that is too busy; another try can help."""
    return ApiError(503, message, kind=SERVER, code="overloaded", retry_after=1.0)


def of_call(failure: Failure, names: Mapping[str, str], output: int | None = None) -> ApiError:
    """Returns the client's error for a failed call.

    Args:
        failure: The call's failure.
        names: Field of quire.v1, as a path from the spec, to the client's field.
        output: Number of output tokens that the request wants.
    """
    status, kind = STATUSES.get(failure.code, (500, SERVER))
    if not failure.reason:
        if TOO_LARGE in failure.message:
            return ApiError(413, "the request is larger than the server takes; its --max-message-bytes is the limit")
        # gRPC's own limit is no rate limit: after a 429 clients would try again in vain.
        if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            status, kind = 500, SERVER
        code = failure.code.name.lower()
        return ApiError(status, UNSAID.get(failure.code, "the request failed"), None, kind, code, failure.retry_after)
    field = failure.field.removeprefix("spec.")
    param = "model" if failure.reason == "MODEL_NOT_FOUND" else translated(field, names) if field else None
    message = INSTEAD.get(failure.reason) or in_words_of(names, failure.message, field, param)
    code, overlong = failure.reason.lower(), overlong_words(failure.message, output)
    if overlong is not None:
        code, message = OVERLONG, f"{overlong} {OVERLONG}: {message}"  # langchain searches the text for the code
    return ApiError(status, message, param, kind, code, failure.retry_after)


def in_words_of(names: Mapping[str, str], message: str, field: str, param: str | None) -> str:
    """Replaces field names in a server's "field is VALUE: reason" by the client's names.

    The value is the client's own, and stays. Other messages stay as they are.
    """
    start = f"{field} is "
    if not (field and message.startswith(start)):
        return message
    rest = message[len(start) :]
    end = LONGEST_VALUE if rest[LONGEST_VALUE - 3 : LONGEST_VALUE + 2] == "...: " else 0
    value, reason = rest[:end], rest[end:]
    known = sorted((name for name in names if "." in name), key=len, reverse=True)
    parts = re.compile("|".join([*QUOTED, *map(re.escape, known)]))
    return f"{param or field} is {value}{parts.sub(lambda found: names.get(found[0], found[0]), reason)}"


FUNCTIONS = (
    (re.compile(r"^chat\.tools(\[\d+\])\.(\w+)$"), r"chat.tools\1.function.\2"),
    (re.compile(r"\.tool_calls(\[\d+\])\.(name|arguments)$"), r".tool_calls\1.function.\2"),
)
"""What stands in an inner object in OpenAI's chats, and not in its responses."""


def translated(field: str, names: Mapping[str, str]) -> str | None:
    """Returns the client's name of a server's field, by its longest known prefix; None if the client has none."""
    if names.get("chat.messages") == "input" and field.startswith("chat.messages"):
        return "input"  # whose items are others than the messages
    parts = re.fullmatch(r"chat\.messages\[(\d+)\](?:\.parts\[(\d+)\](\.image)?|\.(\w+))?", field)
    if parts is not None:
        message, part, image, other = parts.groups()
        inside = f".content[{part}]" + (".image_url" if image else "") if part else f".{other}" if other else ""
        return f"messages[{message}]{inside}"
    for pattern, ours in FUNCTIONS if names.get("chat.messages") == "messages" else ():
        field = pattern.sub(ours, field)
    for theirs in sorted(names, key=len, reverse=True):
        rest = field[len(theirs) :]
        if field.startswith(theirs) and (not rest or rest[0] in "[."):
            return names[theirs] + rest
    return None


def of_validation(error: ValidationError) -> ApiError:
    """Returns the error for the first wrong field."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = path(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param[:100]}'.", param[:100], code="unknown_parameter")
    if first["type"] == "missing":
        message = f"Missing required parameter: '{param}'."
        return ApiError(400, message, param, code="missing_required_parameter")
    code = first["type"] if first["type"] in ("unsupported_parameter", "unsupported_value") else "invalid_value"
    text = first["msg"]
    message = f"{param} {text}" if code.startswith("unsupported") else f"{param} is {shown(first['input'])}: {text}"
    return ApiError(400, message, param or None, code=code)


TAGS = ("message", "function_call", "function_call_output", "reasoning", "text", "image")
"""pydantic's names for forms of a response's items and of their parts. Others are no identifiers."""


def path(location: tuple[int | str, ...]) -> str:
    """Returns a location as a path: ("messages", 0, "content") is "messages[0].content"."""
    kept = list[int | str]()
    for i, step in enumerate(location):
        of_item = i > 0 and isinstance(location[i - 1], int) and step in TAGS
        if not (of_item or (isinstance(step, str) and not step.isidentifier())):
            kept.append(step)
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in kept).lstrip(".")


def shown(value: Any) -> str:
    """Returns a client's value, shortened for an error's message."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if value is None or isinstance(value, bool | int | float):
        return "a huge number" if isinstance(value, int) and value.bit_length() > 200 else json.dumps(value)
    return "a list" if isinstance(value, list) else "an object"
