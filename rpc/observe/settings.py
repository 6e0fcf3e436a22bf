"""What a server says of itself, and of its requests."""

import re
from dataclasses import dataclass, field

FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Logs and traces, which have nothing of what requests say or are told."""

    log_format: str = field(
        default="text",
        metadata={"help": "Of lines on standard error. text, or json: an object a line, those of engines too."},
    )
    log_requests: bool = field(
        default=False,
        metadata={"help": "A line for each request that has ended: whose it was, how it ended, tokens and times."},
    )
    otlp_traces_endpoint: str | None = field(
        default=None,
        metadata={
            "help": "http://HOST:PORT of an OpenTelemetry collector (OTLP over gRPC) that gets a trace of each "
            "request. Unset: none."
        },
    )

    def __post_init__(self) -> None:
        if self.log_format not in FORMATS:
            raise ValueError(f"--log-format is {self.log_format!r}, must be one of {', '.join(FORMATS)}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^/]+", endpoint):
            raise ValueError(f"--otlp-traces-endpoint is {endpoint!r}, must be http://HOST:PORT or https://HOST:PORT")
