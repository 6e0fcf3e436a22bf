"""Lines that Ray prints for its actors become Quire's log lines."""

import json
import subprocess
import sys

import pytest

from rpc.observe.logs import to_json_object

OURS = {"level": "INFO", "logger": "quire.model", "message": "Weights", "process": "engine", "timestamp": "now"}


@pytest.mark.parametrize(
    ("line", "more"),
    [
        (json.dumps(OURS), {}),
        (f"(EngineActor pid=91) {json.dumps(OURS)}\n", {"actor": "EngineActor", "pid": "91"}),
        (
            f"\x1b[36m(FollowerActor pid=9, ip=10.0.0.2)\x1b[0m {json.dumps(OURS)} [repeated 2x across cluster]\n",
            {"actor": "FollowerActor", "pid": "9", "node": "10.0.0.2"},
        ),
        (f"(EngineActor pid=91) {json.dumps(OURS | {'pid': 'its own word'})}", {"actor": "EngineActor", "pid": "91"}),
    ],
)
def test_an_object_stays_one(line: str, more: dict[str, str]) -> None:
    assert to_json_object(line, "cluster") == OURS | more


def test_the_last_lines_come_out() -> None:
    script = (
        "from rpc.observe.logs import redirect_output_as_json\n"
        "redirect_output_as_json('cluster')\nprint('a line', flush=True)\nraise RuntimeError('the last word')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    lines = [json.loads(line)["message"] for line in done.stderr.splitlines()]
    assert lines[0] == "a line"
    assert lines[-1] == "RuntimeError: the last word"


@pytest.mark.parametrize("line", ["something broke", "(raylet) it broke", "7", "[1]", '"x"', "{", "", "{} {"[3:]])
def test_anything_else_becomes_a_message(line: str) -> None:
    made = to_json_object(line, "cluster")
    assert made["message"] == line
    assert made["process"] == "cluster"
    assert made.keys() == OURS.keys()
