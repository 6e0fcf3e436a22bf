"""Settings of a simulation: its traffic, and the deployment that serves it."""

import math
import re
from dataclasses import dataclass, field

from rpc.loadgen.traces import KINDS, KNOWN
from rpc.simulation.served import LatencyTargets

FORMATS = ("azure", "mooncake", "recorded")
UNITS = {"ms": 1e-3, "s": 1.0}
MOST_TENANTS = 100_000
SLO = re.compile(r"(ttft|itl)=([0-9]+(?:\.[0-9]+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """Requests of a simulation."""

    trace: str = field(
        default="azure-conv",
        metadata={
            "help": "azure-conv, mooncake, or a file: .csv (Azure's format), .jsonl (Mooncake's), or a recording of "
            "`quire serve --record`."
        },
    )
    format: str | None = field(
        default=None, metadata={"help": "azure, mooncake or recorded. Unset: by the name of the file."}
    )
    requests: int | None = field(default=None, metadata={"help": "Number of requests. Unset: all.", "min": 1})
    speed: float = field(default=1.0, metadata={"help": "Factor of the arrivals' rate."})
    deadline: float | None = field(
        default=None, metadata={"help": "Seconds that each client waits for its whole output. Unset: without end."}
    )
    tenants: int | None = field(
        default=None,
        metadata={
            "help": "Number of tenants that the requests of a trace are dealt to, by a draw with --seed: number n gets "
            "a part in proportion to 1/n (Zipf's law). Unset: one tenant. Recordings have their own.",
            "min": 1,
            "max": MOST_TENANTS,
        },
    )

    def __post_init__(self) -> None:
        if self.format not in (None, *FORMATS):
            raise ValueError(f"--format is {self.format!r}, must be one of {', '.join(FORMATS)}")
        for name in ("speed", "deadline"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} is {value}, must be above 0")

    @property
    def recorded(self) -> bool:
        """Whether the trace is a recording."""
        known = self.trace in KNOWN or any(map(self.trace.endswith, KINDS))
        return self.format == "recorded" or (self.format is None and not known)


@dataclass(frozen=True, slots=True)
class SimulatedEngineSettings:
    """Engines of a simulation, and the choice among them."""

    profile: str | None = field(
        default=None,
        metadata={
            "help": "Engine: a profile that ships with Quire, or a file of `quire calibrate`. Unset: that of the "
            "recording, else llama-3.1-8b-h100."
        },
    )
    router: str = field(
        default="cost",
        metadata={"help": "Router: cost (that of `quire serve`), least-requests, random or round-robin."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the router's choices, and of the draw of --tenants."})


@dataclass(frozen=True, slots=True)
class DeploymentSettings:
    """Number of the engines, and what happens to them."""

    replicas: int = field(default=1, metadata={"help": "Engines at the start, and the fewest.", "min": 1})
    start: float = field(
        default=30.0, metadata={"flag": "--start-seconds", "help": "Seconds until a new engine serves."}
    )
    failover: float = field(
        default=1.0, metadata={"flag": "--failover-seconds", "help": "Seconds until the end of an engine is noticed."}
    )
    faults: str | None = field(
        default=None,
        metadata={
            "help": 'JSON file with a list of faults: {"at": seconds, "kind": "kill" or "slow", "engine": number}, '
            'and of slow ones "seconds" and "factor". `quire serve --sim-faults` reads the same file.'
        },
    )


def parse_slo(text: str) -> LatencyTargets:
    """Reads targets such as "ttft=500ms,itl=50ms". Raises ValueError."""
    found = dict[str, float]()
    for part in text.split(","):
        match = SLO.fullmatch(part.strip())
        if match is None or match[1] in found or not float(match[2]):
            raise ValueError(
                f"--slo is {text!r}, must be ttft=TIME, itl=TIME or both with a comma, as ttft=500ms,itl=0.05s"
            )
        found[match[1]] = float(match[2]) * UNITS[match[3]]
    return LatencyTargets(**found)
