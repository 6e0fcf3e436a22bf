"""A plan's answer is that of trying all numbers of engines, with fewer trials."""

import pytest

from rpc.simulation.cluster import fillers
from rpc.simulation.deployment import Deployment
from rpc.simulation.planning import Plan
from rpc.simulation.routers import ROUTERS
from rpc.simulation.scenario import Scenario
from rpc.simulation.served import LatencyTargets
from rpc.simulation.traffic import submits
from scheduler.settings import SCHEDULING_POLICIES
from tests.simulation.test_cluster import PATIENT, arrivals
from tests.simulation.test_engine import COSTS

TARGETS = LatencyTargets(ttft=0.4)


def scenario(rate: float) -> Scenario:
    deployment = Deployment(PATIENT, COSTS, router="round-robin")
    return Scenario(deployment, submits(arrivals(50, rate, 8), 16), fillers, "test", "no machine")


@pytest.mark.parametrize("rate", [2.0, 15.0, 40.0, 80.0])
def test_the_fewest_are_found(rate: float) -> None:
    plan = Plan(scenario(rate), TARGETS, 0.9, 8)
    trials = [*plan.fewest()]
    every = Plan(scenario(rate), TARGETS, 0.9, 8)
    enough = [n for n in range(1, 9) if every.tried(n).enough]
    assert enough == [*range(enough[0], 9)]  # so there is one answer
    assert plan.answer == enough[0]
    assert plan.trials == trials
    assert len(trials) <= 8


def test_too_few_are_said_to_be() -> None:
    plan = Plan(scenario(80.0), TARGETS, 1.0, 2)
    assert [one.replicas for one in plan.fewest()] == [1, 2]
    assert plan.answer is None


def test_alternatives_change_one_thing_each() -> None:
    plan = Plan(scenario(15.0), TARGETS, 0.95, 4)
    found = {one.change: one for one in plan.alternatives(2)}
    policies = {f"policy {name}" for name in SCHEDULING_POLICIES if name != PATIENT.settings.policy}
    routers = {f"router {name}" for name in ROUTERS if name != "round-robin"}
    assert set(found) == {"+50% pages"} | policies | routers
    assert {one.replicas for one in found.values()} == {2}
    assert plan.answer is None  # a change is no answer
    assert not any(one.change.startswith("router") for one in plan.alternatives(1))
