"""Exceptions of the clients: one class for each thing that a program can do about a failure."""

import grpc

from rpc.client.failures import Failure, failure_of


class QuireError(RuntimeError):
    """A call that failed.

    Attributes:
        code: gRPC status code.
        reason: Stable UPPER_SNAKE name for programs; "" if a proxy answered in Quire's place.
        field: Path of the wrong field in the request; "" if no field is wrong.
        retry_after: Seconds after which another try can help; None if the server names no time.
        server: HOST:PORT that was asked.
    """

    def __init__(self, failure: Failure, server: str) -> None:
        super().__init__(sentence(failure, server))
        self.code, self.reason, self.field = failure.code, failure.reason, failure.field
        self.retry_after, self.server = failure.retry_after, server


class InvalidRequestError(QuireError):
    """The request cannot be served as it is."""


class NotFoundError(QuireError):
    """The server has no such model, replica or request."""


class RequestIdLiveError(QuireError):
    """A live request has this id."""


class AccessError(QuireError):
    """The server wants a token, or another one."""


class OverloadedError(QuireError):
    """The server is overloaded, or this client reads too slowly. Another try can help."""


class UnavailableError(QuireError):
    """No server answers, or none is ready."""


class DeadlineError(QuireError):
    """The call's time is over."""


class CancelledError(QuireError):
    """The call was cancelled."""


ERROR_CLASSES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: RequestIdLiveError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
}


def error_of(error: grpc.RpcError, server: str) -> QuireError:
    """Returns the exception for a failed call to `server`, sync or asyncio."""
    failure = failure_of(error)
    return ERROR_CLASSES.get(failure.code, QuireError)(failure, server)


def sentence(failure: Failure, server: str) -> str:
    """Returns the failure as a sentence for people."""
    message = failure.message
    # gRPC's own failures to connect have no reason; only their text distinguishes them.
    if failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason and "onnect" in message:
        if any(word in message.lower() for word in ("handshake", "certificate", "ssl")):
            return f"no secure connection to {server}: {message}"
        return f"no server answers at {server}"
    return f"{failure.code.name}: {message}{message_hint(message)}"


def message_hint(details: str | None) -> str:
    """Returns the remedy for a request message that is too large; "" for other failures.

    gRPC refuses such a message itself, so its text is the only sign.
    """
    return "; the server's --max-message-bytes is the limit" if "larger than max" in (details or "") else ""
