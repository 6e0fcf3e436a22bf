"""What Ray's driver is told when it starts."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """directory: private to the server, for a cluster of this machine alone, which has room for so many processes.
    address: of a cluster that is there. token_file: that lets one into it. start_seconds: for an engine's actor to be
    placed. cpus: that each process of an engine reserves, None for as many as a node has. lease: seconds that an engine
    stays without a frontend, None for ever. spread: the ranks of an engine may be on different nodes. log_format: of
    its processes' lines.
    """

    directory: str | None
    processes: int
    start_seconds: float
    address: str | None = None
    token_file: str | None = None
    cpus: float | None = None
    lease: float | None = None
    spread: bool = False
    log_format: str = "text"

    def to_json(self) -> str:
        return json.dumps(asdict(self))
