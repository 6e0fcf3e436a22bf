"""Settings of `quire gateway`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rpc.addresses import is_loopback

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
LARGEST_HEADERS = 2**14  # bytes of a request's line and headers


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Addresses, certificates, and limits of what the gateway takes from clients. Times are seconds."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=8000, metadata={"help": "HTTP port; 0 picks a free one."})
    metrics_port: int | None = field(
        default=None,
        metadata={
            "help": "HTTP port of /metrics; 0 picks a free one. Unset: --port has /metrics, if --host can be reached "
            "from this machine alone."
        },
    )
    metrics_host: str = field(default="127.0.0.1", metadata={"help": "Address that --metrics-port listens on."})
    allow_insecure_bind: bool = field(
        default=False, metadata={"help": "Listen on a --host that other machines reach, without TLS."}
    )
    tls_cert: str | None = field(default=None, metadata={"help": "Certificate chain, PEM: serve HTTPS."})
    tls_key: str | None = field(
        default=None, metadata={"help": "Private key of --tls-cert, PEM. Unset: in the same file."}
    )
    server_tls: bool = field(
        default=False, metadata={"help": "The servers have certificates that this machine trusts."}
    )
    server_ca: str | None = field(
        default=None,
        metadata={"help": "PEM file of the authority that signed the servers' certificates. Unset: a public one."},
    )
    server_cert: str | None = field(
        default=None, metadata={"help": "PEM file of the gateway's own certificate, for servers that ask for one."}
    )
    server_key: str | None = field(default=None, metadata={"help": "PEM file of its key."})
    plaintext_token: bool = field(
        default=False,
        metadata={
            "help": "Clients' tokens may go to servers on other machines without TLS, although others can read "
            "them on the way."
        },
    )
    max_body: int = field(
        default=20 * 2**20,
        metadata={"flag": "--max-body-bytes", "size": True, "help": "Largest body of a request."},
    )
    body_memory: int = field(
        default=2**28,
        metadata={
            "flag": "--max-live-body-memory",
            "size": True,
            "help": "Bytes of bodies that live requests may hold until they end.",
        },
    )
    max_prompts: int = field(default=128, metadata={"help": "Prompts of one request."})
    max_calls: int = field(default=1024, metadata={"help": "Prompts that may be at the servers at once."})
    max_connections: int = field(default=2048, metadata={"help": "Connections of clients at once."})
    request_time: float = field(
        default=600.0,
        metadata={
            "flag": "--max-request-time",
            "help": "Seconds after which a request ends with the output that it has.",
        },
    )
    read_time: float = field(
        default=30.0,
        metadata={
            "help": "Seconds that a client may take for a request's headers, for its body, and for a TLS handshake."
        },
    )
    write_stall: float = field(
        default=30.0,
        metadata={"help": "Seconds that a client may read nothing (or less than 4 KiB a second) before it is cut off."},
    )
    drain: float = field(
        default=60.0, metadata={"flag": "--drain-time", "help": "Seconds that running requests get after SIGTERM."}
    )

    def __post_init__(self) -> None:
        for flag, port in (("--port", self.port), ("--metrics-port", self.metrics_port or 0)):
            if not 0 <= port < 65536:
                raise ValueError(f"{flag} is {port}, must be in [0, 65536)")
        if (self.server_cert is None) != (self.server_key is None):
            raise ValueError("--server-cert and --server-key go together")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("--tls-key needs --tls-cert")
        if not is_loopback(self.host) and self.tls_cert is None and not self.allow_insecure_bind:
            raise ValueError(
                f"--host {self.host} can be reached from other machines, and there is no TLS: prompts, answers and "
                "tokens could be read on their way. Give --tls-cert and --tls-key, serve on 127.0.0.1, or insist with "
                "--allow-insecure-bind"
            )
        if self.max_body < 1024:
            raise ValueError(f"--max-body-bytes is {self.max_body}, must be at least 1024")
        if self.body_memory < self.max_body:
            raise ValueError(
                f"--max-live-body-memory is {self.body_memory}, must be at least --max-body-bytes ({self.max_body})"
            )
        for flag, value in (
            ("--max-prompts", self.max_prompts),
            ("--max-calls", self.max_calls),
            ("--max-connections", self.max_connections),
            ("--max-request-time", self.request_time),
            ("--read-time", self.read_time),
            ("--write-stall", self.write_stall),
            ("--drain-time", self.drain),
        ):
            if not value > 0:
                raise ValueError(f"{flag} is {value}, must be above 0")

    @property
    def shows_metrics(self) -> bool:
        """Whether the API's port has /metrics: not if they have their own, or other machines reach the API."""
        return self.metrics_port is None and is_loopback(self.host)

    def check_way_to(self, servers: Sequence[str]) -> None:
        """Checks that tokens and prompts cannot be read on their way to the servers.

        Args:
            servers: HOST:PORT of each.

        Raises:
            ValueError: A server is on another machine, and there is no TLS.
        """
        if self.server_tls or self.server_ca or self.server_cert or self.plaintext_token:
            return
        for server in servers:
            if not is_loopback(server.rpartition(":")[0].strip("[]")):
                raise ValueError(
                    f"--server {server} is on another machine, and there is no TLS: clients' tokens, prompts and "
                    "answers could be read on their way. Give --server-tls or --server-ca, or insist with "
                    "--plaintext-token"
                )


def check_origin(flag: str, origin: str) -> None:
    """Checks a value of --allow-origin. Raises ValueError for a text that no browser sends as its Origin."""
    if not ORIGIN.fullmatch(origin):
        raise ValueError(f"{flag} is {origin!r}, must be *, https://HOST or http://HOST:PORT")
