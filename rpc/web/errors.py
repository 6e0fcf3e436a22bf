"""Failures in the form of the dashboard: an HTTP status and {"error": {reason, message}}."""

import json
from typing import Any

from starlette.responses import Response

from rpc.frontend.errors import RequestFailed

STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""Code of a failure, to HTTP status; other codes are 500."""


def error_of(failure: RequestFailed) -> dict[str, Any]:
    """Returns the JSON of a failure."""
    return {"error": {"reason": failure.reason, "message": failure.message}}


def response_of(failure: RequestFailed, status: int | None = None) -> Response:
    """Returns the response of a failure. `status` overrides the one of its code."""
    return json_response(error_of(failure), status or STATUSES.get(failure.code, 500))


def json_response(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
