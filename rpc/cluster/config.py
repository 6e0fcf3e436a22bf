"""What Ray's driver is told when it starts."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Settings of one server's driver.

    Attributes:
        name: Of the server in the cluster, `quire:MODEL`; names of its actors and placement groups begin with it.
        directory: Private to the server, for a cluster of this machine alone.
        processes: The number of processes that such a cluster has room for.
        start_seconds: For an engine's actor to be placed.
        address: Of a cluster that is there.
        token_file: That lets one into it.
        cpus: That each process of an engine reserves. None: as many as a node has.
        lease: Seconds that an engine stays without a frontend. None: for ever.
        spread: The ranks of an engine may be on different nodes.
        log_format: Of its processes' lines.
    """

    name: str
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
