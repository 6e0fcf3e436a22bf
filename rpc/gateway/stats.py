"""Counters of one HTTP request, for metrics, log and spans. They have no text of prompts or outputs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.v1 import generation_service_pb2 as pb

ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models",
    "/health",
    "/version",
    "/metrics",
)
OTHER = "other"
CLIENT_LEFT = 499  # nginx's status for a client that left before its answer began


def endpoint_of(path: str) -> str:
    """Returns the path as one of a few names, so that a client's paths cannot multiply metrics."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{name}"
    return path if path in ENDPOINTS else OTHER


@dataclass(slots=True)
class RequestStats:
    """Counters of a request, filled while it is answered.

    Attributes:
        method: HTTP method.
        endpoint: Name of the path, from `endpoint_of`.
        trace: W3C headers of the request.
        on_tokens: Called with the number of new tokens.
        arrived: Arrival in seconds since the epoch.
        status: HTTP status of the response; CLIENT_LEFT if none began.
        error: Error code, also of a failure after the status was sent; None without one.
        model: Model name in the response.
        first_token: Seconds from arrival to the first token; None before it.
        seconds: Seconds from arrival to the end.
        completion_tokens: Number of tokens from servers.
    """

    method: str
    endpoint: str
    trace: Mapping[str, str]
    on_tokens: Callable[[int], object]
    arrived: float = field(default_factory=time.time)
    status: int = CLIENT_LEFT
    error: str | None = None
    model: str = ""
    first_token: float | None = None
    seconds: float = 0.0
    completion_tokens: int = 0
    _began: float = field(default_factory=time.monotonic)
    _prompts: dict[int, int] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    def count_message(self, position: int, message: pb.StreamGenerateResponse) -> None:
        """Counts a message of the stream of the prompt at `position`."""
        if message.HasField("prompt_info"):
            self._prompts[position] = message.prompt_info.token_count
        count = sum(delta.token_count for delta in message.deltas)
        if count:
            if self.first_token is None:
                self.first_token = time.monotonic() - self._began
            self.completion_tokens += count
            self.on_tokens(count)

    def end(self) -> None:
        self.seconds = time.monotonic() - self._began
