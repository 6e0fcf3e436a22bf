"""Engines show their own metrics, and Prometheus is told where."""

import json
import re
import urllib.request
from pathlib import Path

import grpc

from tests.support.forking import run_quire
from tests.support.processes import find, wait_until
from tests.support.server import running_alone, stream_request


def scraped(target: dict) -> dict[str, float]:
    (address,) = target["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        re.sub(r"\{.*\}", "", line.split()[0]): float(line.split()[1]) for line in lines if not line.startswith("#")
    }


def test_targets_are_the_engines_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    with running_alone("--kv-cache-memory", "64MiB", "--metrics-targets", str(path)) as server:
        with grpc.insecure_channel(server.address) as channel:
            list(server.stub(channel).StreamGenerate(stream_request("ROMEO:", 5)))
        (target,) = json.loads(path.read_text())
        engine = find(server.process.pid, "rpc.engines.engine_process")
        assert target["labels"] == {"replica": "0", "epoch": "1", "place": f"process {engine.pid}"}
        samples = scraped(target)
        assert samples["quire_engine_steps_total"] > 0
        assert samples["process_resident_memory_bytes"] > 2**26
        shown = server.metrics()
        assert shown["quire_generation_tokens_total"] == 5
        assert "quire_engine_steps_total" not in shown, "it would count twice"
        engine.kill()
        wait_until(lambda: [t["labels"]["epoch"] for t in json.loads(path.read_text())] == ["2"], "a new target", 30)
        assert [file.name for file in tmp_path.iterdir()] == ["engines.json"]
    assert json.loads(path.read_text()) == []


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    flags = ["--port", "0", "--metrics-port", "0", "--admin-port", "0", "--metrics-targets", f"{tmp_path}/no/file"]
    ended = run_quire("serve", *flags)
    assert ended.returncode == 1
    assert "No such file or directory" in ended.stderr
    assert "Traceback" not in ended.stderr
