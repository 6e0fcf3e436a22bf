"""Places an engine's processes in a Ray cluster: their needs, the nodes' resources, and the wait for room."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("quire.cluster")

FIRST_REPORT, LATER_REPORTS = 5.0, 30.0  # seconds after which a wait is logged, and then logged again
KINDS = ("CPU", "GPU")


class PlacementError(RuntimeError):
    """There is no room for an engine; the message has its needs and each node's resources."""


class ClusterGoneError(PlacementError):
    """No node is alive."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources that an engine needs.

    Attributes:
        processes: Count of processes, one for each rank.
        cpus: CPUs that each process reserves.
        gpus: GPUs that each process reserves.
        spread: The processes may be on different nodes.
    """

    processes: int = 1
    cpus: float = 1
    gpus: int = 0
    spread: bool = False

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that one process reserves, by Ray's names."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def __str__(self) -> str:
        where = "" if self.processes == 1 else " on any nodes" if self.spread else " on one node"
        return f"{self.processes} x {shown(self.bundle)}{where}"


def needs_gpu(device: str, there: float, may_come: bool) -> bool:
    """Returns whether each process of an engine reserves a GPU.

    Args:
        device: Value of --device.
        there: Count of the cluster's GPUs now.
        may_come: Nodes may join the cluster later, of an autoscaler say, which adds only nodes that are asked for.
    """
    return device != "cpu" and (there > 0 or (device == "cuda" and may_come))


def shown(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{kind}: {resources[kind]:g}" for kind in KINDS if resources.get(kind)) + "}"


def describe_nodes(nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> str:
    """Describes the nodes' resources in a sentence.

    Args:
        nodes: Nodes as `ray.nodes()` returns them.
        free: Resources of each node that are free, by its id.
    """
    alive = [node for node in nodes if node["Alive"]]
    parts = [
        f"{node['NodeManagerAddress']} has {shown(node['Resources'])}, free {shown(free.get(node['NodeID'], {}))}"
        for node in alive
    ]
    dead = len(nodes) - len(alive)
    return "; ".join(parts or ["there is no node"]) + (f"; {dead} more have died" if dead else "")


def engines_per_node(needs: Needs, engines: int, nodes: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many of the server's engines one node may have to hold, now or after others are placed anew.

    Args:
        needs: Needs of each engine.
        engines: Count of the server's engines.
        nodes: Nodes that an engine is on, as `ray.nodes()` returns them.
    """
    if needs.gpus:
        return 1  # each process has a GPU, and its memory, for itself
    room = max((int(node["Resources"].get("CPU", 0) // needs.cpus) for node in nodes), default=0)
    return max(1, min(engines, room if needs.spread else room // needs.processes))


def nodes_of(group: Any) -> list[dict[str, Any]]:
    """Returns the nodes that a placement group is on, as `ray.nodes()` returns them."""
    import ray
    from ray.util.placement_group import placement_group_table

    places = set(placement_group_table(group)["bundles_to_node_id"].values())
    return [node for node in ray.nodes() if node["NodeID"] in places]


def place(needs: Needs, seconds: float, cancelled: threading.Event, name: str) -> Any:
    """Waits for a placement group for an engine's processes. The log says what it waits for.

    Args:
        needs: Needs of the engine.
        seconds: Time that the placement may take.
        cancelled: Ends the wait.
        name: Name of the placement group.

    Returns:
        The placement group, which the caller removes.

    Raises:
        PlacementError: There was no room in time, or the wait was cancelled.
        ClusterGoneError: No node is alive.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    strategy = "PACK" if needs.spread else "STRICT_PACK"
    group = placement_group([needs.bundle] * needs.processes, strategy=strategy, name=name)
    began = time.monotonic()
    next_report = began + FIRST_REPORT
    try:
        while not group.wait(0.5):
            now = time.monotonic()
            if cancelled.is_set():
                raise PlacementError(f"{name} is not wanted any more")
            if not any(node["Alive"] for node in ray.nodes()):
                raise ClusterGoneError(f"{name} has no node to go to: {_nodes()}")
            if now - began > seconds:
                raise PlacementError(f"{name} found no room within {seconds:g} s: it needs {needs}; {_nodes()}")
            if now > next_report:
                log.info("%s waits for room: it needs %s; %s", name, needs, _nodes())
                next_report = now + LATER_REPORTS
    except BaseException:
        if ray.is_initialized():
            remove_placement_group(group)
        raise
    return group


def _nodes() -> str:
    import ray
    from ray._private.state import available_resources_per_node

    return describe_nodes(ray.nodes(), available_resources_per_node())
