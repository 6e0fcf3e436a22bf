"""A Ray cluster of several machines is joined with a token alone, and what is wrong with it is said at once."""

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
    """What a server says that does not start."""
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
def test_wrong_tokens_are_refused(machine: Node) -> None:
    other = machine.place / "other"
    other.write_text("0" * 64)
    other.chmod(0o644)
    assert "can be used by others" in refusal(machine, "--ray-token-file", str(other))
    other.chmod(0o600)
    assert "refuses the token" in refusal(machine, "--ray-token-file", str(other))
    assert "there is none in" in refusal(machine, "--ray-token-file", str(machine.place / "nowhere"))


@needs_nodes
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


@needs_nodes
def test_nothing_of_a_server_stays_in_the_cluster() -> None:
    """However it ends: asked to, or killed."""
    with nodes.nodes(1) as (machine,):
        address = nodes.start_ray([machine], [1])
        where = ["--ray-address", address, "--ray-token-file", str(machine.token), "--ray-cpus", "1"]
        ports = ["--port", "0", "--metrics-port", "0", "--admin-port", "0"]
        watch = machine.start(sys.executable, "-c", WATCH, address, "1", "0", "1", "0")
        assert watch.stdout is not None
        for end in (signal.SIGTERM, signal.SIGKILL):
            server = nodes.serve_on(machine, *where, *ports)
            assert server.stdout is not None
            assert READY.search(line := server.stdout.readline()), f"the server said {line!r}"
            assert watch.stdout.readline() == "1\n"
            os.kill(server.pid, end)
            server.wait()
            assert watch.stdout.readline() == "0\n"
            wait_until(lambda: not engines_of(machine), "the end of its engines", 30)


def engines_of(node: Node) -> list[int]:
    return [pid for pid in node.pids() if "ray::EngineActor" in nodes.command_of(pid)]


@needs_nodes
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
