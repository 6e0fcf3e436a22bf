"""An engine's request to a Ray cluster, and how many engines of a server may share a node."""

import importlib
import threading

import pytest
import ray

from model.settings import ModelSettings
from rpc.cluster.config import ClusterConfig
from rpc.cluster.driver import Driver
from rpc.cluster.placement import (
    ClusterGoneError,
    Needs,
    PlacementError,
    describe_nodes,
    engines_per_node,
    needs_gpu,
    place,
)
from rpc.settings import EngineConfig


def nodes(*cpus: float) -> list[dict]:
    return [{"Alive": True, "NodeID": str(i), "Resources": {"CPU": count}} for i, count in enumerate(cpus)]


@pytest.mark.parametrize(
    ("needs", "engines", "cpus", "most"),
    [
        (Needs(cpus=8), 3, (8,), 1),
        (Needs(cpus=2), 3, (8,), 3),
        (Needs(cpus=2), 5, (8,), 4),
        (Needs(cpus=0.5), 2, (1,), 2),
        (Needs(processes=2, cpus=2), 3, (8,), 2),
        (Needs(processes=4, cpus=2, spread=True), 3, (4, 4), 2),
        (Needs(processes=4, cpus=2, spread=True), 3, (2, 8), 3),
        (Needs(cpus=1, gpus=1), 3, (8,), 1),
        (Needs(cpus=1), 3, (), 1),
    ],
)
def test_as_many_as_have_room_there(needs: Needs, engines: int, cpus: tuple[float, ...], most: int) -> None:
    assert engines_per_node(needs, engines, nodes(*cpus)) == most


@pytest.mark.parametrize(
    ("device", "there", "may_come", "needed"),
    [
        ("auto", 2, True, True),
        ("auto", 0, True, False),
        ("auto", 0, False, False),
        ("cuda", 2, False, True),
        ("cuda", 0, True, True),  # its node is started for it
        ("cuda", 0, False, False),  # this machine has none: the engine says so
        ("cpu", 2, True, False),
    ],
)
def test_an_engine_needs_a_gpu_that_is_there_or_is_insisted_on(
    device: str, there: float, may_come: bool, needed: bool
) -> None:
    assert needs_gpu(device, there, may_come) is needed


def test_what_nodes_have_counts_the_dead_ones() -> None:
    alive = {"Alive": True, "NodeID": "0", "NodeManagerAddress": "10.0.0.4", "Resources": {"CPU": 8.0, "memory": 1e9}}
    dead = {"Alive": False, "NodeID": "1", "NodeManagerAddress": "10.0.0.5", "Resources": {}}
    assert describe_nodes([alive, dead], {"0": {"CPU": 2.0}}) == (
        "10.0.0.4 has {CPU: 8}, free {CPU: 2}; 1 more have died"
    )
    assert describe_nodes([], {}) == "there is no node"


class FakeRay:
    """Placement groups of a cluster that has room or not. asked: for what. removed: how many."""

    def __init__(self, patch: pytest.MonkeyPatch, room: bool, alive: bool = True) -> None:
        self.asked: list[tuple[list[dict[str, float]], str, str]] = []
        self.removed = 0
        self._room = room
        there = {"Alive": alive, "NodeID": "0", "NodeManagerAddress": "10.0.0.4", "Resources": {"CPU": 8.0}}
        groups = importlib.import_module("ray.util.placement_group")  # its parent has a function of this name
        patch.setattr(groups, "placement_group", self._make)
        patch.setattr(groups, "remove_placement_group", self._remove)
        patch.setattr(ray, "nodes", lambda: [there])
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr("ray._private.state.available_resources_per_node", dict)

    def _make(self, bundles: list[dict[str, float]], strategy: str, name: str) -> "FakeRay":
        self.asked.append((bundles, strategy, name))
        return self

    def _remove(self, group: "FakeRay") -> None:
        assert group is self
        self.removed += 1

    def wait(self, seconds: float) -> bool:
        return self._room


@pytest.mark.parametrize(("spread", "strategy"), [(False, "STRICT_PACK"), (True, "PACK")])
def test_ranks_share_a_node_unless_they_may_be_apart(
    monkeypatch: pytest.MonkeyPatch, spread: bool, strategy: str
) -> None:
    fake = FakeRay(monkeypatch, room=True)
    needs = Needs(processes=2, cpus=4, gpus=1, spread=spread)
    assert place(needs, 1.0, threading.Event(), "engine") is fake
    assert fake.asked == [([{"CPU": 4, "GPU": 1.0}] * 2, strategy, "engine")]
    assert fake.removed == 0


@pytest.mark.parametrize(
    ("alive", "cancel", "kind", "message"),
    [
        (True, False, PlacementError, r"found no room within 0 s: it needs 1 x \{CPU: 1\}; 10.0.0.4 has \{CPU: 8\}"),
        (True, True, PlacementError, "is not wanted any more"),
        (False, False, ClusterGoneError, "has no node to go to: there is no node; 1 more have died"),
    ],
)
def test_a_place_that_is_not_found_is_asked_for_no_longer(
    monkeypatch: pytest.MonkeyPatch, alive: bool, cancel: bool, kind: type[Exception], message: str
) -> None:
    fake, cancelled = FakeRay(monkeypatch, room=False, alive=alive), threading.Event()
    if cancel:
        cancelled.set()
    with pytest.raises(kind, match=message):
        place(Needs(), 0.0, cancelled, "engine")
    assert fake.removed == 1


@pytest.mark.parametrize(
    ("ranks", "spread", "reserved", "each"),
    [(1, False, None, 8), (2, False, None, 4), (2, True, None, 8), (16, False, None, 1), (2, False, 3.0, 3.0)],
)
def test_an_engine_in_a_cluster_takes_the_processors_of_one_node(
    monkeypatch: pytest.MonkeyPatch, ranks: int, spread: bool, reserved: float | None, each: float
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes(4, 8), {"Alive": False, "Resources": {"CPU": 64}}])
    config = ClusterConfig("quire:m", None, ranks, 1.0, address="10.0.0.4:6379", cpus=reserved, spread=spread)
    driver = Driver(config, report=-1, flush_lines=lambda: None)
    needs = driver.needs_of(EngineConfig(model=ModelSettings(tensor_parallel=ranks)))
    assert needs == Needs(ranks, each, 0, spread)
