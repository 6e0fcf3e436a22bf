"""Machines of a Ray cluster as network namespaces of this one: their links can be cut from outside.

Each has a network of its own behind a router, which is a namespace too, so that nothing of this machine's network is
touched.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.server import QUIRE, clean_environment

RAY = str(Path(sys.executable).parent / "ray")
PORT = 6379
START_SECONDS = 90


def why_not() -> str:
    """Why this machine cannot have such nodes, "" if it can."""
    if shutil.which("ip") is None:
        return "there is no ip command (Debian: iproute2)"
    name = f"qprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Node:
    """One machine. name: of its namespace. address: in the cluster's network."""

    name: str
    address: str
    place: Path
    token: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return clean_environment() | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
            "TMPDIR": str(self.place),
        }

    def start(self, *command: str, **variables: str) -> subprocess.Popen:
        """Runs a command on this machine. variables: of its environment."""
        whole = ["ip", "netns", "exec", self.name, *command]
        process = subprocess.Popen(
            whole, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            env=self.environment | variables, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """Its cable is pulled."""
        ip("-n", self.name, "link", "set", "eth", "down")

    def mend(self) -> None:
        ip("-n", self.name, "link", "set", "eth", "up")

    def pids(self) -> list[int]:
        """Processes of this machine. `ip netns pids` says the same, in a process of its own for each look."""
        own = os.stat(f"/run/netns/{self.name}").st_ino
        return [int(pid.name) for pid in Path("/proc").iterdir() if pid.name.isdigit() and network_of(pid) == own]

    def kill(self) -> None:
        """The machine loses its power."""
        deadline = time.monotonic() + 10
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"{self.name} still runs {pids}"
            time.sleep(0.02)


def network_of(process: Path) -> int:
    """Returns the inode of a process's network namespace, 0 for a process that is gone."""
    try:
        return os.stat(process / "ns/net").st_ino
    except OSError:
        return 0


@contextmanager
def nodes(count: int) -> Iterator[list[Node]]:
    """Makes `count` machines on one network, without Ray. Afterwards nothing of them is left."""
    tag = f"q{secrets.token_hex(4)}"  # with one random byte, two networks of a process met in 1 of 256 runs
    switch, made = f"{tag}s", list[Node]()
    place = Path(tempfile.mkdtemp(prefix=tag, dir="/tmp"))
    token = place / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    ip("netns", "add", switch)
    try:
        forwarding = ["ip", "netns", "exec", switch, "sysctl", "-qw", "net.ipv4.ip_forward=1"]
        subprocess.run(forwarding, check=True, capture_output=True)
        for i in range(count):
            name = f"{tag}{i}"
            (place / str(i)).mkdir()
            ip("netns", "add", name)
            made.append(Node(name, f"10.77.{i}.2", place / str(i), token))
            ip("-n", switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth", "netns", name)
            ip("-n", switch, "addr", "add", f"10.77.{i}.1/24", "dev", f"p{i}")
            ip("-n", switch, "link", "set", f"p{i}", "up")
            ip("-n", name, "addr", "add", f"{made[i].address}/24", "dev", "eth")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth", "up")
            ip("-n", name, "route", "add", "default", "via", f"10.77.{i}.1")
        yield made
    finally:
        for node in made:
            node.kill()
            for process in node.processes:
                process.wait()
            subprocess.run(["ip", "netns", "del", node.name], check=False)
        subprocess.run(["ip", "netns", "del", switch], check=False)
        shutil.rmtree(place, ignore_errors=True)


def start_with_dashboard(node: Node, python: Path, cpus: int, **variables: str) -> str:
    """A head with a dashboard, for which this Python has what Ray needs. Returns the dashboard's address."""
    command = [
        str(python), RAY, "start", "--head", f"--port={PORT}", f"--node-ip-address={node.address}",
        f"--num-cpus={cpus}", "--block", f"--temp-dir={node.place / 'ray'}", "--object-store-memory=100000000",
        "--disable-usage-stats", "--include-dashboard=true",
    ]  # fmt: skip
    _wait_started(node.start(*command, **variables), node)
    return "http://127.0.0.1:8265"


def start_ray(machines: Sequence[Node], cpus: Sequence[int], **variables: str) -> str:
    """The first is the head. variables: of Ray's environment. Returns the cluster's address."""
    head, *others = machines
    join_ray(head, head, cpus[0], **variables)
    starting = [_start_ray(head, node, count, **variables) for node, count in zip(others, cpus[1:], strict=True)]
    for node, process in zip(others, starting, strict=True):
        _wait_started(process, node)
    return f"{head.address}:{PORT}"


def join_ray(head: Node, node: Node, cpus: int, **variables: str) -> None:
    """The node becomes one of this head's cluster, or its head."""
    _wait_started(_start_ray(head, node, cpus, **variables), node)


def _start_ray(head: Node, node: Node, cpus: int, **variables: str) -> subprocess.Popen:
    where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    if node is not head:
        where = [f"--address={head.address}:{PORT}"]
    command = [
        RAY, "start", *where, f"--node-ip-address={node.address}", f"--num-cpus={cpus}", "--block",
        f"--temp-dir={node.place / 'ray'}", "--object-store-memory=100000000", "--disable-usage-stats",
    ]  # fmt: skip
    return node.start(*command, **variables)


def _wait_started(process: subprocess.Popen, node: Node) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            return
    raise AssertionError(f"Ray did not start on {node.address}: {''.join(said)}")


def serve_on(node: Node, *flags: str) -> subprocess.Popen:
    return node.start(QUIRE, "serve", *flags)


def command_of(pid: int) -> str:
    """ "" for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
