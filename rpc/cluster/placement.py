"""Where in a Ray cluster an engine's processes go: what they need, what the nodes have, and a wait that says so."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("quire.cluster")

FIRST_WORD, LATER_WORDS = 5.0, 30.0  # seconds after which a wait says what it waits for, and says it again
KINDS = ("CPU", "GPU")


class PlacementError(RuntimeError):
    """There is no room for an engine; says what it needs and what each node has."""


class ClusterGoneError(PlacementError):
    """No node is alive."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Of an engine. processes: one for each rank. cpus, gpus: that each of them reserves. spread: they may be on
    different nodes.
    """

    processes: int = 1
    cpus: float = 1
    gpus: int = 0
    spread: bool = False

    @property
    def bundle(self) -> dict[str, float]:
        """What one process reserves."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def __str__(self) -> str:
        where = "" if self.processes == 1 else " on any nodes" if self.spread else " on one node"
        return f"{self.processes} x {shown(self.bundle)}{where}"


def needs_gpu(device: str, there: float, may_come: bool) -> bool:
    """Whether each process of an engine reserves a GPU. device: as --device has it. there: GPUs of the cluster now.
    may_come: it is one that others start nodes of, an autoscaler say, which does so for what is asked for alone.
    """
    return device != "cpu" and (there > 0 or (device == "cuda" and may_come))


def shown(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{kind}: {resources[kind]:g}" for kind in KINDS if resources.get(kind)) + "}"


def what_nodes_have(nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence. nodes: as `ray.nodes()` gives them. free: of each by its id, what is not taken."""
    alive = [node for node in nodes if node["Alive"]]
    parts = [
        f"{node['NodeManagerAddress']} has {shown(node['Resources'])}, free {shown(free.get(node['NodeID'], {}))}"
        for node in alive
    ]
    dead = len(nodes) - len(alive)
    return "; ".join(parts or ["there is no node"]) + (f"; {dead} more have died" if dead else "")


def sharing(needs: Needs, engines: int, nodes: Sequence[Mapping[str, Any]]) -> int:
    """How many of so many engines alike there can be on one of these nodes, now or once others are placed anew. nodes:
    as `ray.nodes()` gives them.
    """
    if needs.gpus:
        return 1  # each process has a GPU, and its memory, for itself
    room = max((int(node["Resources"].get("CPU", 0) // needs.cpus) for node in nodes), default=0)
    return max(1, min(engines, room if needs.spread else room // needs.processes))


def nodes_of(group: Any) -> list[dict[str, Any]]:
    """On which a placement group has its places."""
    import ray
    from ray.util.placement_group import placement_group_table

    places = set(placement_group_table(group)["bundles_to_node_id"].values())
    return [node for node in ray.nodes() if node["NodeID"] in places]


def place(needs: Needs, seconds: float, cancelled: threading.Event, name: str) -> Any:
    """A placement group for these processes, to be removed by the caller. Says what it waits for. Raises PlacementError
    after so many seconds or where it is cancelled, ClusterGoneError.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    strategy = "PACK" if needs.spread else "STRICT_PACK"
    group = placement_group([needs.bundle] * needs.processes, strategy=strategy, name=name)
    began = time.monotonic()
    word = began + FIRST_WORD
    try:
        while not group.wait(0.5):
            now = time.monotonic()
            if cancelled.is_set():
                raise PlacementError(f"{name} is not wanted any more")
            if not any(node["Alive"] for node in ray.nodes()):
                raise ClusterGoneError(f"{name} has no node to go to: {_nodes()}")
            if now - began > seconds:
                raise PlacementError(f"{name} found no room within {seconds:g} s: it needs {needs}; {_nodes()}")
            if now > word:
                log.info("%s waits for room: it needs %s; %s", name, needs, _nodes())
                word = now + LATER_WORDS
    except BaseException:
        if ray.is_initialized():
            remove_placement_group(group)
        raise
    return group


def _nodes() -> str:
    import ray
    from ray._private.state import available_resources_per_node

    return what_nodes_have(ray.nodes(), available_resources_per_node())
