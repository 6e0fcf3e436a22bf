"""Settings of a server process: where it listens and what it serves."""

import ipaddress
from dataclasses import dataclass, field

from model.settings import ModelSettings
from rpc.frontend.settings import FrontendSettings
from scheduler.settings import QueueLimits, RequestLimits, SchedulerSettings


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All of `quire serve`. port, metrics_port: 0 picks a free one. served_model_name: None takes the directory's."""

    model: ModelSettings
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9464
    reflection: bool = False
    allow_insecure_bind: bool = False
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    queue: QueueLimits = field(default_factory=QueueLimits)
    request: RequestLimits = field(default_factory=RequestLimits)
    frontend: FrontendSettings = field(default_factory=FrontendSettings)

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


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
