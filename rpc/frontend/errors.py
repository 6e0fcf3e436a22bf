"""Failures of requests, in terms that every API can translate: a gRPC status, an exit message, an exception."""

from dataclasses import dataclass

from scheduler.events import End, EndReason
from scheduler.invalid import InvalidRequest


@dataclass(eq=False)
class RequestFailed(Exception):
    """Failure of a request.

    Attributes:
        code: Name of the canonical gRPC status.
        reason: UPPER_SNAKE name of the cause, stable, for programs.
        message: Explanation for people.
        field: Field of the request that was wrong, for INVALID_ARGUMENT; "" otherwise.
        retry_after: Seconds after which another try can succeed; None where none can.
    """

    code: str
    reason: str
    message: str
    field: str = ""
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message


def internal() -> RequestFailed:
    return RequestFailed("INTERNAL", "INTERNAL", "an internal error ended this request; the server's log has it")


def invalid(error: InvalidRequest) -> RequestFailed:
    return RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", str(error), field=error.field)


def unanswered(most: int) -> RequestFailed:
    """Returns the failure of a stream for which the process that checks constraints takes too long.

    Args:
        most: Count of tokens that may wait for its answer.
    """
    message = (
        f"more than {most} tokens, the limit of --max-backlog, wait for an answer to whether a string of stopping.stop "
        "ends this output: the process that checks constraints is slow or has many to answer"
    )
    return RequestFailed("UNAVAILABLE", "GRAMMAR_UNCHECKED", message, retry_after=1.0)


def failed_end(end: End) -> RequestFailed | None:
    """Returns the failure that an engine's end means to a client, None for an end that is a result."""
    match end.reason:
        case EndReason.QUEUE_FULL:
            return RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", end.message, retry_after=end.retry_after)
        case EndReason.QUEUE_TIMEOUT:
            return RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT", end.message, retry_after=end.retry_after)
        case EndReason.STUCK:
            message = "allowed_token_ids, bad_words, min_tokens and structured_output together leave no token to draw"
            return RequestFailed("INVALID_ARGUMENT", "NO_TOKEN_LEFT", end.message or message, field="sampling")
        case EndReason.FAULT:
            return RequestFailed("INTERNAL", "REQUEST_FAULT", f"this request could not be computed: {end.message}")
        case EndReason.ENGINE_FAILED:
            return RequestFailed("UNAVAILABLE", "ENGINE_FAILED", "the engine has failed", retry_after=5.0)
        case _:
            return None
