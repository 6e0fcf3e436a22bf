"""Settings of a server's logs and traces."""

import re
from dataclasses import dataclass, field

FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Logs and traces. Neither has text of prompts or outputs."""

    log_format: str = field(
        default="text",
        metadata={"help": "Format of lines on standard error, engines' too: text, or json, an object a line."},
    )
    log_requests: bool = field(
        default=False,
        metadata={"help": "Log a line for each request that has ended: its tenant, outcome, tokens and times."},
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
