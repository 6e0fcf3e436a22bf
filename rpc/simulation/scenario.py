"""What is simulated: traffic, and the deployment that serves it, as settings say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from model.simulated.faults import STALL, Fault, read_faults
from rpc.engines.recordings import read_recording
from rpc.loadgen.traces import read_trace, scaled, shrink_of
from rpc.simulation.changes import Changes
from rpc.simulation.cluster import Cluster, fillers
from rpc.simulation.deployment import Deployment
from rpc.simulation.engine import Draws
from rpc.simulation.recorded import Trace, recorded_draws, recorded_holds, recorded_stops, recorded_traffic
from rpc.simulation.served import Ledger
from rpc.simulation.settings import DeploymentSettings, SimulatedEngineSettings, TrafficSettings
from rpc.simulation.tenants import with_tenants
from rpc.simulation.traffic import Timed, submits
from scheduler.profile import Profile, read_profile
from scheduler.scaling_settings import ScalingSettings

PROFILE = "llama-3.1-8b-h100"


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A simulation that can be run.

    Attributes:
        deployment: Engines, router and faults.
        traffic: Events of clients.
        draws_of: Makes what draws tokens.
        engine: Name of the engine's profile.
        source: Where its costs come from.
        shrink: Factor of the lengths in the trace, so that the longest request fits the engine.
        held: As in `Cluster`.
        stops: As in `Cluster`.
    """

    deployment: Deployment
    traffic: Sequence[Timed]
    draws_of: Callable[[Ledger], Draws]
    engine: str
    source: str
    shrink: float = 1.0
    held: Mapping[int, float] = field(default_factory=dict)
    stops: Mapping[int, int] = field(default_factory=dict)

    def cluster(self) -> Cluster:
        """Returns a new simulation."""
        return Cluster(self.deployment, self.traffic, self.draws_of, self.held, self.stops)


def scenario_of(
    traffic: TrafficSettings,
    engines: SimulatedEngineSettings,
    changes: Changes,
    deployment: DeploymentSettings | None = None,
    scaling: ScalingSettings | None = None,
) -> Scenario:
    """Reads a scenario's files.

    Args:
        traffic: Its requests.
        engines: Its engines and its router.
        changes: Of the engines' settings.
        deployment: Number of engines and faults; None for one engine without.
        scaling: Of the number of engines; None keeps it.

    Raises:
        OSError: A file cannot be read.
        ValueError: A setting or a file is not valid.
    """
    number = deployment or DeploymentSettings()
    faults = _faults_of(number, scaling)

    def made(profile: Profile) -> Deployment:
        return Deployment(
            changes.of(profile.blueprint), profile.costs, number.replicas, scaling or ScalingSettings(),
            engines.router, number.start, number.failover, faults, engines.seed,
        )  # fmt: skip

    if traffic.recorded:
        trace = Trace.of(read_recording(Path(traffic.trace)))
        if not trace.requests:
            raise ValueError(f"{traffic.trace}: no request came in this recording")
        known = trace.profile(Path(traffic.trace).name)
        profile = known if engines.profile is None else read_profile(engines.profile)
        if traffic.deadline is not None:
            raise ValueError("--deadline does not go with a recording, whose clients have their own")
        if traffic.tenants is not None:
            raise ValueError("--tenants does not go with a recording, whose requests have their own")
        mine = profile.blueprint.layout.page_size
        if trace.page_size is not None and trace.page_size != mine:
            raise ValueError(
                f"{profile.name} has pages of {mine} tokens, and the recording knows its prompts by pages of "
                f"{trace.page_size}: take a profile with such pages, or record with --record-tokens"
            )
        most, deployed = traffic.requests or len(trace.requests), made(profile)
        events = [one for one in recorded_traffic(trace, deployed.longest, traffic.speed) if one.request < most]
        held, stops = recorded_holds(trace), recorded_stops(trace)
        draws_of, name = recorded_draws(trace), profile.name
        return Scenario(
            deployed, events, draws_of, name, profile.source,
            held={request: seconds for request, seconds in held.items() if request < most},
            stops={request: tokens for request, tokens in stops.items() if request < most},
        )  # fmt: skip
    profile = read_profile(engines.profile or PROFILE)
    arrivals = read_trace(traffic.trace, traffic.requests, traffic.format)
    longest = replace(profile, blueprint=changes.of(profile.blueprint)).longest
    shrink, fitting = shrink_of(arrivals, longest), scaled(arrivals, longest, traffic.speed)
    page_size = profile.blueprint.layout.page_size
    timed = submits(fitting, page_size, shrink, traffic.deadline)
    if traffic.tenants is not None:
        timed = with_tenants(timed, traffic.tenants, engines.seed)
    return Scenario(made(profile), timed, fillers, profile.name, profile.source, shrink)


def _faults_of(settings: DeploymentSettings, scaling: ScalingSettings | None) -> tuple[Fault, ...]:
    """Reads the faults of a deployment. Raises as `scenario_of`."""
    if settings.faults is None:
        return ()
    path, most = Path(settings.faults), None if scaling is None else scaling.replicas
    flag = "--replicas" if most is None else "--max-replicas"
    faults = read_faults(path, settings.replicas if most is None else most, flag)
    for number, fault in enumerate(faults):
        if fault.kind == STALL:
            raise ValueError(f"{path}: fault {number}: kind is {STALL!r}, which only `quire serve --sim-faults` has")
    return faults
