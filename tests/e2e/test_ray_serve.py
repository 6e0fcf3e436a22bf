"""Quire started by others: as an application of Ray Serve, and as a job of a Ray cluster."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import nodes
from tests.support.nodes import Node
from tests.support.processes import wait_until
from tests.support.server import QUIRE, READY

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/serve/bin/python"  # `.ci/run` makes it
BIN = Path(sys.executable).parent
WHY = nodes.why_not() or ("" if PYTHON.exists() else "there is no build/serve (.ci/run: ray[serve])")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY), reason=WHY or "-")]

ASK = """
import json, sys, urllib.request
def ask(**more):
    body = {"model": "quire-demo", "prompt": "ROMEO:", "max_tokens": 12, "temperature": 0} | more
    url, headers = "http://127.0.0.1:8000/v1/completions", {"content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60).read()
whole = json.loads(ask())["choices"][0]["text"]
events = [event.removeprefix("data: ") for event in ask(stream=True).decode().split("\\n\\n") if event]
streamed = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
print(json.dumps([whole, streamed, events[-1]]))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[Node, str]]:
    """A machine with a Ray cluster of its own that has a dashboard, and the dashboard's address."""
    with nodes.nodes(1) as (machine,):
        # A job that is stopped gets as long as it drains.
        yield machine, nodes.start_with_dashboard(machine, PYTHON, 3, RAY_JOB_STOP_WAIT_TIME_S="60")


def ray(machine: Node, program: str, *words: str, **variables: str) -> str:
    """Runs a command of Ray, which has to succeed, and returns what it prints."""
    process = machine.start(str(PYTHON), str(BIN / program), *words, **variables)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    return said


def engines(machine: Node) -> list[int]:
    return [pid for pid in machine.pids() if "ray::EngineActor" in nodes.command_of(pid)]


def test_ray_serve_runs_it_with_the_gateway_as_ingress(head: tuple[Node, str]) -> None:
    machine, dashboard = head
    flags = ["model=demo", "ray-cpus=1", "kv-cache-memory=64MiB"]
    words = ["run", "--non-blocking", "quire.ray_serve:app", *flags]
    ray(machine, "serve", *words, RAY_ADDRESS=f"{machine.address}:{nodes.PORT}")
    assert len(engines(machine)) == 1
    asking = machine.start(sys.executable, "-c", ASK)
    whole, streamed, end = json.loads(asking.communicate(timeout=60)[0])
    assert whole == streamed != ""
    assert end == "[DONE]"
    ray(machine, "serve", "shutdown", "-y", "-a", dashboard)
    wait_until(lambda: not engines(machine), "the end of its engine", 60)
    left = [nodes.command_of(pid) for pid in machine.pids()]
    assert [command for command in left if "rpc.cluster.driver" in command or "die_with_parent" in command] == []


def test_a_job_of_the_cluster_can_be_a_server(head: tuple[Node, str]) -> None:
    machine, dashboard = head
    flags = "--ray-cpus 1 --kv-cache-memory 64MiB --port 0 --metrics-port 0 --admin-port 0"
    command = f"exec {QUIRE} serve --ray-address $RAY_ADDRESS {flags}"

    def job(*words: str) -> str:
        return ray(machine, "ray", "job", *words, RAY_ADDRESS=dashboard)

    job("submit", "--no-wait", "--submission-id", "chat", "--", "bash", "-c", command)
    wait_until(lambda: bool(READY.search(job("logs", "chat"))), "the job's ready line", 90)
    assert "submission_id='chat', driver_info=DriverInfo" in job("list"), "the driver's job is the submitted one"
    job("stop", "chat")
    assert "was stopped" in job("status", "chat")
    assert "draining" in job("logs", "chat")
    wait_until(lambda: not engines(machine), "the end of its engine", 60)
