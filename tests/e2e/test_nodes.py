"""A Ray cluster of several machines, which are network namespaces: engines on each, links cut and machines killed."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.support import nodes
from tests.support.nodes import Node
from tests.support.processes import wait_until
from tests.support.server import READY

pytestmark = pytest.mark.skipif(bool(nodes.why_not()), reason=nodes.why_not() or "-")

ACTOR = re.compile("ray::(Engine|Follower)Actor")


@dataclass
class Cluster:
    """Machines, the first of which is the head and has the server. address: of the server."""

    machines: list[Node]
    server: subprocess.Popen
    address: str
    streams: int
    tokens: int

    def client(self) -> subprocess.Popen:
        """Watches streams, from the head's machine."""
        module = "tests.support.watching_client"
        return self.machines[0].start(sys.executable, "-m", module, self.address, str(self.streams), str(self.tokens))

    def engines(self) -> dict[str, list[int]]:
        """Processes of engines by the address of their machine."""
        found: dict[str, list[int]] = {}
        for machine in self.machines:
            pids = [pid for pid in machine.pids() if ACTOR.search(nodes.command_of(pid))]
            if pids:
                found[machine.address] = pids
        return found


def result_of(client: subprocess.Popen) -> list[dict]:
    assert client.stdout is not None
    told = json.loads(client.stdout.readline())
    assert client.wait() == 0
    for history in told:
        assert (history["wrong"], history["status"]) == ([], "OK")
    return told


def until_running(client: subprocess.Popen) -> None:
    assert client.stdout is not None
    assert client.stdout.readline() == "running\n"


@contextmanager
def serving(*flags: str, streams: int = 12, tokens: int = 500, started: int = 4) -> Iterator[Cluster]:
    """A server whose engines take two of three machines.

    Args:
        flags: Further flags of the server.
        streams: Number of streams.
        tokens: Tokens of each stream.
        started: Number of machines in the cluster, with the head.
    """
    with nodes.nodes(4) as machines:
        address = nodes.start_ray(machines[:started], [0, 1, 1, 1][:started])
        head = machines[0]
        where = ["--ray-address", address, "--ray-token-file", str(head.token), "--host", head.address]
        ports = ["--port", "0", "--metrics-port", "0", "--admin-port", "0", "--allow-insecure-bind"]
        server = nodes.serve_on(head, *where, *ports, "--engine-lease", "4", "--engine-start-timeout", "120", *flags)
        assert server.stdout is not None
        found = READY.search(line := server.stdout.readline())
        assert found, f"the server said {line!r}"
        yield Cluster(machines, server, found[2], streams, tokens)


@pytest.mark.parametrize("ways", [["cut"], pytest.param(["cut", "kill"], marks=pytest.mark.slow)], ids=" ".join)
@pytest.mark.slow
def test_streams_go_on_with_another_replica(ways: list[str]) -> None:
    """A machine that is cut off lets go of its engine by itself: nothing could tell it to. The one that takes its place
    finds room on the third machine; then another one loses its power.
    """
    with serving("--replicas", "2") as cluster:
        for how in ways:
            check_one_goes(cluster, how)


@pytest.mark.slow
def test_streams_of_a_divided_model_go_on_with_the_next_group() -> None:
    """One of two ranks is cut off: both end, and two others find room."""
    with serving("--tensor-parallel", "2", "--spread", streams=4, tokens=60) as cluster:
        check_one_goes(cluster, "cut")


@pytest.mark.slow
def test_an_engine_that_the_load_needs_waits_for_a_machine() -> None:
    """As a placement group, which is what Ray's autoscaler adds nodes for; here the test adds one."""
    flags = ["--max-replicas", "2", "--scale-use", "0.01", "--scale-up-delay", "0", "--kv-cache-memory", "64MiB"]
    with serving(*flags, started=2) as cluster:
        head, *others = cluster.machines
        client = cluster.client()
        until_running(client)
        wait_until(lambda: "PENDING" in placement_groups(head), "a placement group that waits for room", 60)
        result_of(client)
        assert len(cluster.engines()) == 1
        nodes.join_ray(head, others[1], 1)
        wait_until(lambda: len(cluster.engines()) == 2, "the engine on the new machine", 90)
        result_of_a_run(cluster)


def placement_groups(head: Node) -> str:
    """Their states, as Ray has them."""
    script = (
        f"import ray; ray.init('{head.address}:{nodes.PORT}', log_to_driver=False, logging_level='ERROR');"
        "from ray.util import placement_group_table; print([g['state'] for g in placement_group_table().values()])"
    )
    process = head.start(sys.executable, "-c", script)
    return process.communicate(timeout=60)[0]


def result_of_a_run(cluster: Cluster) -> None:
    client = cluster.client()
    until_running(client)
    result_of(client)


def check_one_goes(cluster: Cluster, end: str) -> None:
    before = cluster.client()
    until_running(before)
    expected = result_of(before)
    engines = cluster.engines()
    assert len(engines) == 2
    victim = next(m for m in cluster.machines if m.address in engines)
    client = cluster.client()
    until_running(client)
    if end == "cut":
        victim.cut()
    else:
        victim.kill()
    told = result_of(client)
    for name in ("tokens", "texts", "finishes"):
        assert [history[name] for history in told] == [history[name] for history in expected]
    if end == "cut":
        wait_until(lambda: victim.address not in cluster.engines(), "the end of the engine that was cut off", 30)
        victim.mend()
