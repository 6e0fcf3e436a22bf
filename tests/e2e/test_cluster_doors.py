"""A Ray cluster of several machines is joined with a token alone, and what is wrong with it is said at once."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rpc.cluster.token import find_token
from tests.support import nodes
from tests.support.nodes import Node
from tests.support.processes import wait_until
from tests.support.server import READY

needs_nodes = pytest.mark.skipif(bool(nodes.why_not()), reason=nodes.why_not() or "-")


@pytest.fixture(scope="module")
def machine() -> Iterator[Node]:
    """The head of a cluster that asks for a token."""
    with nodes.nodes(1) as machines:
        nodes.start_ray(machines, [0])
        yield machines[0]


@pytest.fixture(scope="module")
def open_machine() -> Iterator[Node]:
    """The head of one that does not."""
    with nodes.nodes(1) as machines:
        nodes.start_ray(machines, [0], RAY_AUTH_MODE="disabled")
        yield machines[0]


def refusal(node: Node, *flags: str) -> str:
    """Returns the last words of a server that does not start."""
    address = f"{node.address}:{nodes.PORT}"
    command = ["ip", "netns", "exec", node.name, nodes.QUIRE, "serve", "--port", "0", "--metrics-port", "0"]
    ended = subprocess.run(
        [*command, "--admin-port", "0", "--ray-address", address, *flags],
        capture_output=True, text=True, timeout=100, env=node.environment, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr


@needs_nodes
@pytest.mark.slow
def test_wrong_tokens_are_refused(machine: Node) -> None:
    other = machine.place / "other"
    other.write_text("0" * 64)
    other.chmod(0o644)
    assert "can be used by others" in refusal(machine, "--ray-token-file", str(other))
    other.chmod(0o600)
    assert "refuses the token" in refusal(machine, "--ray-token-file", str(other))
    assert "there is none in" in refusal(machine, "--ray-token-file", str(machine.place / "nowhere"))


@needs_nodes
@pytest.mark.slow
def test_a_wait_for_room_says_what_is_needed_and_what_each_node_has(machine: Node) -> None:
    flags = ["--ray-token-file", str(machine.token), "--ray-cpus", "3", "--engine-start-timeout", "2"]
    said = refusal(machine, *flags)
    assert "found no room within 2 s: it needs 1 x {CPU: 3}; " in said
    assert f"{machine.address} has {{}}, free {{}}" in said


WATCH = """
import sys, time
import ray
from ray.util import placement_group_table
ray.init(address=sys.argv[1], logging_level="ERROR")
for due in map(int, sys.argv[2:]):
    deadline = time.monotonic() + 60
    while sum(group["state"] != "REMOVED" for group in placement_group_table().values()) != due:
        assert time.monotonic() < deadline, f"there are no {due} placement groups"
        time.sleep(0.05)
    print(due, flush=True)
"""


WHOSE = """
import json, sys
import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import JobTableData
from ray.util import list_named_actors, placement_group_table
ray.init(address=sys.argv[1], logging_level="ERROR")
table = state._connect_and_get_accessor().get_job_table()
entries = [JobTableData.FromString(entry) for entry in table]
jobs = [(entry.entrypoint, dict(entry.config.metadata)) for entry in entries if not entry.is_dead]
groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
actors = [(actor["namespace"], actor["name"]) for actor in list_named_actors(all_namespaces=True)]
print(json.dumps({"actors": actors, "groups": groups, "jobs": jobs}))
"""


@pytest.mark.slow
@needs_nodes
def test_a_cluster_shows_whose_engines_it_has_and_keeps_none_of_a_server_that_ended() -> None:
    """Two servers of one model, one of which is asked to end; the other one is killed."""
    with nodes.nodes(1) as (machine,):
        address = nodes.start_ray([machine], [2])
        where = ["--ray-address", address, "--ray-token-file", str(machine.token), "--ray-cpus", "1"]
        ports = ["--port", "0", "--metrics-port", "0", "--admin-port", "0", "--kv-cache-memory", "64MiB"]
        servers = [nodes.serve_on(machine, *where, *ports) for _ in range(2)]
        watch = machine.start(sys.executable, "-c", WATCH, address, "2", "1", "0")
        for server in servers:
            assert server.stdout is not None
            assert READY.search(line := server.stdout.readline()), f"the server said {line!r}"
        assert watch.stdout is not None
        assert watch.stdout.readline() == "2\n"
        check_names(json.loads(machine.start(sys.executable, "-c", WHOSE, address).communicate(timeout=60)[0]))
        for left, server, end in ((1, servers[0], signal.SIGTERM), (0, servers[1], signal.SIGKILL)):
            os.kill(server.pid, end)
            server.wait()
            assert watch.stdout.readline() == f"{left}\n"
            wait_until(lambda left=left: len(engines_of(machine)) == left, "the end of its engine", 30)


def check_names(shown: dict[str, list]) -> None:
    """Checks the names that the cluster shows for two servers of the demo model."""
    assert [name for _, name in shown["actors"]] == ["quire:quire-demo:engine-0-1:rank-0"] * 2
    assert len({namespace for namespace, _ in shown["actors"]}) == 2, "the names do not collide"
    assert all(namespace.startswith("quire:quire-demo:") for namespace, _ in shown["actors"])
    assert shown["groups"] == ["quire:quire-demo:engine-0-1"] * 2
    ours = [(entrypoint, metadata) for entrypoint, metadata in shown["jobs"] if "rpc.cluster.driver" in entrypoint]
    assert len(ours) == 2
    for entrypoint, metadata in ours:
        assert entrypoint.endswith("rpc.cluster.driver quire:quire-demo")
        assert metadata["job_name"] == "quire:quire-demo"


def engines_of(node: Node) -> list[int]:
    return [pid for pid in node.pids() if "ray::EngineActor" in nodes.command_of(pid)]


@needs_nodes
@pytest.mark.slow
def test_a_cluster_without_a_token_is_refused(open_machine: Node) -> None:
    assert "asks for no token" in refusal(open_machine, "--ray-token-file", str(open_machine.token))


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [(None, 0, "there is none in"), ("t", 0o640, "can be used by others"), ("\n", 0o600, "is empty")],
)
def test_a_token_file_has_to_be_one(tmp_path, content: str | None, mode: int, message: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    for given, environment in ((str(path), {}), (None, {"RAY_AUTH_TOKEN_PATH": str(path)})):
        with pytest.raises(ValueError, match=message):
            find_token(given, environment)


def test_a_good_one_is_found_where_ray_looks(tmp_path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("secret")
    assert find_token(None, {"RAY_AUTH_TOKEN_PATH": str(path)}) == find_token(str(path), {}) == str(path)
