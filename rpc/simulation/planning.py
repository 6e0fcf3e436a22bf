"""How many engines a traffic needs: the fewest with which enough requests are served within targets."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rpc.simulation.changes import Changes
from rpc.simulation.deployment import Deployment
from rpc.simulation.routers import ROUTERS
from rpc.simulation.scenario import Scenario
from rpc.simulation.served import LatencyTargets
from scheduler.scaling_settings import ScalingSettings
from scheduler.settings import SCHEDULING_POLICIES

MORE_PAGES = "+50%"


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulation of a plan.

    Attributes:
        change: What differs from the deployment that was asked about; "" for nothing.
        replicas: Engines.
        met: Share of the requests that were served within the targets.
        enough: Whether that is the wanted share.
        figures: As `Serving.figures` has them.
    """

    change: str
    replicas: int
    met: float
    enough: bool
    figures: dict[str, float]


class Plan:
    """Finds the fewest engines.

    Attributes:
        trials: All simulations so far, in order.
    """

    def __init__(self, scenario: Scenario, targets: LatencyTargets, share: float, most: int) -> None:
        """Makes a plan.

        Args:
            scenario: Traffic and engines. The number of its engines does not count.
            targets: Latencies of a request.
            share: Share of the requests that have to keep them, 0 to 1.
            most: Engines that are tried at most.
        """
        self._scenario, self._targets, self._share, self._most = scenario, targets, share, most
        self.trials: list[Trial] = []

    def fewest(self) -> Iterator[Trial]:
        """Yields a trial at a time: twice as many engines each, until they are enough, and then between the last two.

        More engines serve no fewer requests in time, or nearly: a router may be lucky. The answer is `answer`.
        """
        low, high = 0, 1
        while True:
            trial = self.tried(high)
            yield trial
            if trial.enough or high == self._most:
                break
            low, high = high, min(2 * high, self._most)
        if not trial.enough:
            return
        while high - low > 1:
            middle = (low + high) // 2
            trial = self.tried(middle)
            yield trial
            low, high = (low, middle) if trial.enough else (middle, high)

    @property
    def answer(self) -> int | None:
        """The fewest engines that were enough; None where none were."""
        return min((one.replicas for one in self.trials if one.enough and not one.change), default=None)

    def alternatives(self, replicas: int) -> Iterator[Trial]:
        """Yields what changes of the engines or of the router would do with this number of engines."""
        deployment = self._scenario.deployment
        made, now = deployment.blueprint, deployment.blueprint.settings.policy
        changes = {f"{MORE_PAGES} pages": Changes(pages=MORE_PAGES)}
        changes |= {f"policy {policy}": Changes(policy=policy) for policy in SCHEDULING_POLICIES if policy != now}
        for name, change in changes.items():
            yield self.tried(replicas, name, replace(deployment, blueprint=change.of(made)))
        others = [router for router in ROUTERS if router != deployment.router and replicas > 1]
        for router in others:
            yield self.tried(replicas, f"router {router}", replace(deployment, router=router))

    def tried(self, replicas: int, change: str = "", deployment: Deployment | None = None) -> Trial:
        """Simulates this number of engines.

        Args:
            replicas: Engines.
            change: What differs; "" for nothing.
            deployment: What is simulated then; None for what was asked about.
        """
        fixed = replace(deployment or self._scenario.deployment, replicas=replicas, scaling=ScalingSettings())
        serving = replace(self._scenario, deployment=fixed).cluster().run()
        met = serving.met(self._targets)
        self.trials.append(Trial(change, replicas, met, met >= self._share - 1e-9, serving.figures()))
        return self.trials[-1]
