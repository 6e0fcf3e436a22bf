"""A Ray cluster of several machines is joined with a token alone, and what is wrong with it is said at once."""

import subprocess
from collections.abc import Iterator

import pytest

from rpc.cluster.token import find_token
from tests.support import nodes
from tests.support.nodes import Node

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
