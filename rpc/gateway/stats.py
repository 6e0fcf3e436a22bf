"""What is known of one request over HTTP when it has ended. Nothing of what it said, or was told."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.v1 import generation_service_pb2 as pb

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/version", "/metrics")
OTHER = "other"
CLIENT_LEFT = 499  # nginx's status for a client that left before its answer began


def endpoint_of(path: str) -> str:
    """Returns one of a few names, whatever a client asks for."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{name}"
    return path if path in ENDPOINTS else OTHER


@dataclass(slots=True)
class RequestStats:
    """Counters of a request, filled while it is answered.

    Attributes:
        method: Of HTTP.
        endpoint: As `endpoint_of` names it.
        trace: W3C headers that it came with.
        on_tokens: Called with the number of new tokens.
        arrived: Seconds since the epoch.
        status: Of the answer; CLIENT_LEFT where none began.
        error: Code of what went wrong, also after the status was sent.
        model: Name that the answer bears.
        first_token: Seconds from its arrival.
        seconds: From its arrival to its end.
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

    def take(self, position: int, message: pb.StreamGenerateResponse) -> None:
        """Counts a message of the stream of the prompt at this position."""
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
