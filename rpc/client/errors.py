"""What a client raises, by what can be done about it."""

import grpc

from rpc.client.failures import Failure, failure_of


class QuireError(RuntimeError):
    """A call that did not succeed. code: of its gRPC status. reason: UPPER_SNAKE, stable, for programs; "" where not
    Quire, but what is between, has answered. field: of the request, which was wrong. retry_after: seconds after which
    another try can help. server: HOST:PORT that answered, or did not.
    """

    def __init__(self, failure: Failure, server: str) -> None:
        super().__init__(sentence(failure, server))
        self.code, self.reason, self.field = failure.code, failure.reason, failure.field
        self.retry_after, self.server = failure.retry_after, server


class InvalidRequestError(QuireError):
    """The request cannot be served as it is."""


class NotFoundError(QuireError):
    """There is no such model, replica or request."""


class RequestIdLiveError(QuireError):
    """A live request has this id."""


class AccessError(QuireError):
    """The server wants a token, or another one."""


class OverloadedError(QuireError):
    """The server has too much to do, or this client reads too slowly. Another try can help."""


class UnavailableError(QuireError):
    """No server is there, or none that serves."""


class DeadlineError(QuireError):
    """The time for it is over."""


class CancelledError(QuireError):
    """It was cancelled."""


KINDS = {
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
    """The failure of a call to this server, sync or asyncio."""
    failure = failure_of(error)
    return KINDS.get(failure.code, QuireError)(failure, server)


def sentence(failure: Failure, server: str) -> str:
    """For a person."""
    message = failure.message
    if failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason and "onnect" in message:
        if any(word in message.lower() for word in ("handshake", "certificate", "ssl")):
            return f"no secure connection to {server}: {message}"
        return f"no server answers at {server}"
    return f"{failure.code.name}: {message}{message_hint(message)}"


def message_hint(details: str | None) -> str:
    """What helps where a request message was too large for a server, which says it in gRPC's words."""
    return "; the server's --max-message-bytes is the limit" if "larger than max" in (details or "") else ""
