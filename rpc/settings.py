"""Settings of a server process: where it listens, and those of its rooms."""

import ipaddress
from dataclasses import dataclass, field

from model.settings import ModelSettings
from rpc.frontend.settings import FrontendSettings
from scheduler.settings import QueueLimits, RequestLimits, SchedulerSettings


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Addresses, and what may come in through them."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=50051, metadata={"help": "gRPC port; 0 picks a free one."})
    metrics_port: int = field(
        default=9464, metadata={"help": "HTTP port of /metrics, on loopback only; 0 picks a free one."}
    )
    allow_insecure_bind: bool = field(
        default=False, metadata={"help": "Listen on a --host that other machines reach, without TLS and token."}
    )
    reflection: bool = field(default=False, metadata={"help": "Serve gRPC reflection."})
    max_message_bytes: int | None = field(
        default=None,
        metadata={
            "size": True,
            "help": "Largest request message; of BatchGenerate too. Unset: 8 bytes a token of context + 64 KiB.",
        },
    )
    max_streams: int = field(default=128, metadata={"help": "Calls at once on a connection."})

    def __post_init__(self) -> None:
        for flag, port in (("--port", self.port), ("--metrics-port", self.metrics_port)):
            if not 0 <= port < 65536:
                raise ValueError(f"{flag} is {port}, must be in [0, 65536)")
        if not is_loopback(self.host) and not self.allow_insecure_bind:
            raise ValueError(
                f"--host {self.host} can be reached from other machines, and there is neither TLS nor a token yet: "
                "anyone who reaches the port could use the model. Serve on 127.0.0.1, or insist with "
                "--allow-insecure-bind"
            )
        if self.max_message_bytes is not None and self.max_message_bytes < 1024:
            raise ValueError(f"--max-message-bytes is {self.max_message_bytes}, must be at least 1024")
        if self.max_streams < 1:
            raise ValueError(f"--max-streams is {self.max_streams}, must be at least 1")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All of `quire serve`."""

    model: ModelSettings = field(default_factory=ModelSettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    queue: QueueLimits = field(default_factory=QueueLimits)
    request: RequestLimits = field(default_factory=RequestLimits)
    frontend: FrontendSettings = field(default_factory=FrontendSettings)


def is_loopback(host: str) -> bool:
    """localhost counts; other names do not, since they can come to mean another address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
