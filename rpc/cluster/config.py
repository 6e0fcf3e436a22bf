"""What Ray's driver is told when it starts."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """directory: private to the server. address: of a cluster that is there, None for one of this machine alone with
    room for so many processes. token_file: that lets one into it. start_seconds: for an engine's actor to be placed.
    cpus: that each process of an engine reserves, None for as many as a node has. lease: seconds that an engine stays
    without a frontend, None for ever. spread: the ranks of an engine may be on different nodes.
    """

    directory: str
    processes: int
    start_seconds: float
    address: str | None = None
    token_file: str | None = None
    cpus: float | None = None
    lease: float | None = None
    spread: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))
