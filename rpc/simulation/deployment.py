"""A deployment that is simulated: engines, router, autoscaling and faults."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.simulated.faults import Fault
from rpc.simulation.routers import ROUTERS
from rpc.simulation.traffic import Timed
from scheduler.blueprint import Blueprint
from scheduler.events import Submit
from scheduler.scaling_settings import ScalingSettings
from scheduler.step_costs import StepCosts

MOST_SECONDS = 1e7


@dataclass(frozen=True, slots=True)
class Deployment:
    """Engines, router and faults of a simulation.

    Attributes:
        blueprint: Of each engine's scheduler.
        costs: Of each engine's steps.
        replicas: Engines at the start, and the fewest.
        scaling: Of their number.
        router: Name of the router.
        start: Seconds until a new engine serves.
        failover: Seconds until an engine's end is noticed.
        faults: Of engines: kills and slow ones.
        seed: Of the router's choices.
    """

    blueprint: Blueprint
    costs: StepCosts
    replicas: int = 1
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    router: str = "cost"
    start: float = 30.0
    failover: float = 1.0
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"--replicas is {self.replicas}, must be at least 1")
        if self.router not in ROUTERS:
            raise ValueError(f"--router is {self.router!r}, must be one of {', '.join(ROUTERS)}")
        for name in ("start", "failover"):
            if not 0 <= (value := getattr(self, name)) <= MOST_SECONDS:
                raise ValueError(f"--{name}-seconds is {value}, must be in [0, {MOST_SECONDS:,.0f}] seconds")
        if (most := self.scaling.replicas) is not None and most < self.replicas:
            raise ValueError(f"--max-replicas is {most}, must be at least --replicas ({self.replicas})")

    @property
    def most(self) -> int:
        """The most engines."""
        return max(self.replicas, self.scaling.replicas or 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the pages of an engine hold."""
        made = self.blueprint
        return made.layout.tokens_in(made.pages, made.settings.ahead) + 1

    def check_lengths(self, traffic: Sequence[Timed]) -> None:
        """Checks that an engine's pages hold each request. Raises ValueError."""
        longest = self.longest
        for one in traffic:
            if isinstance(one.event, Submit):
                request = one.event.request
                if (length := len(request.prompt) + request.max_tokens) > longest:
                    raise ValueError(
                        f"a request that came at {one.at:.3f} s may have {length:,} tokens, more than the {longest:,} "
                        f"that {self.blueprint.pages:,} pages hold"
                    )
