"""Configuration of the process with Ray's driver, which it reads as its first line."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Settings of one server's driver.

    Attributes:
        name: Name of the server in the cluster, `quire:MODEL`; names of its actors and placement groups begin with it.
        directory: Private directory of the server, for a cluster of this machine alone; None for one that runs already.
        processes: Count of processes of all engines; a cluster of this machine has room for as many.
        start_seconds: Seconds that an engine's actor may wait for its place.
        address: HOST:PORT of a cluster that runs already; None: one of this machine alone is started.
        token_file: File with the token of a cluster that runs already; None: the place where Ray looks for it.
        cpus: CPUs that each process of an engine reserves; None: as many as a node has.
        lease: Seconds that an engine lives without a frontend; None: for ever.
        spread: The ranks of an engine may be on different nodes.
        log_format: Format of its processes' log lines.
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
