"""Batch jobs as a user runs them: on an engine of their own, on a server, killed and started again."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpc.cli.batch import LINES_FAILED
from rpc.paths import demo_directory
from tests.support.forking import Quire
from tests.support.server import RunningServer, clean_environment, running_server

LINES, BAD = 1000, frozenset(range(50, 1000, 97))
BROKEN = ("not json", '{"id": "n%d", "prompt": 3}', '{"id": "n%d", "prompt": "A", "sampling": {"temperature": 9}}')


def write_input(path: Path, lines: int = LINES, bad: frozenset[int] = BAD, tokens: int = 4) -> Path:
    """Seeded requests, so that they give the same tokens wherever they run."""
    with path.open("w") as file:
        for i in range(lines):
            request = {
                "id": f"n{i}",
                "prompt": f"Speech {i}:",
                "sampling": {"seed": i},
                "stopping": {"max_tokens": tokens + i % 17, "ignore_eos": True},
                "output": {"top_logprobs": 1} if i % 50 == 0 else {},
            }
            broken = BROKEN[i % 3]
            file.write((broken % i if "%d" in broken else broken) if i in bad else json.dumps(request))
            file.write("\n")
    return path


def start(source: Path, output: Path, *flags: str) -> subprocess.Popen:
    arguments = ["batch", "--input", str(source), "--output", str(output), *flags]
    return Quire(*arguments, stderr=subprocess.PIPE, text=True, env=clean_environment() | {"COLUMNS": "200"})


def finish(job: subprocess.Popen, code: int = 0) -> str:
    """Waits for its end, and returns its standard error."""
    _, said = job.communicate(timeout=240)
    assert job.returncode == code, said
    assert "Traceback" not in said
    return said


def wait_results(job: subprocess.Popen, output: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert job.poll() is None, "the job ended too soon"
        assert time.monotonic() < deadline, "no results come"
        time.sleep(0.01)


def check_results(output: Path, lines: int = LINES, bad: frozenset[int] = BAD, tokens: int = 4) -> list[dict]:
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(results) == lines
    for i, result in enumerate(results):
        if i in bad:
            assert result["error"]["code"] == "INVALID_ARGUMENT"
            assert result["id"] == (i + 1 if i % 3 == 0 else f"n{i}")
            continue
        assert (result["id"], result["finish_reason"]) == (f"n{i}", "length")
        assert len(result["token_ids"]) == result["usage"]["completion_tokens"] == tokens + i % 17
        assert ("logprobs" in result) == (i % 50 == 0)
    assert not output.with_name(output.name + ".waiting").exists()
    return results


def kill_and_go_on(source: Path, output: Path, *flags: str) -> tuple[int, int]:
    """Kills a job half way and starts it again; returns how many results the first one had made, and how often all
    lines were done before a kill came (on a busy machine all that was left may come at once), so that it began anew."""
    before, whole = b"\n" * LINES, -1
    while before.count(b"\n") == LINES:
        whole += 1
        output.unlink(missing_ok=True)
        job = start(source, output, *flags)
        wait_results(job, output, LINES // 3)
        job.kill()
        finish(job, -signal.SIGKILL)
        before = output.read_bytes()
    said = finish(start(source, output, *flags), LINES_FAILED)
    found = re.search(r"going on: (\d+) of 1000 results are there", said)
    assert found
    count = int(found[1])
    again = re.search(r"(\d+) results and (\d+) errors", said)
    assert again
    assert int(again[1]) + int(again[2]) == LINES - count, "a result that was there was computed again"
    assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    return count, whole


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    directory = Path(shutil.copytree(demo_directory(), tmp_path_factory.mktemp("models") / "talker"))
    (directory / "chat_template.jinja").write_text(
        "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    )
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with running_server("--model", str(model)) as running:
        yield running


@pytest.mark.slow
def test_killed_jobs_go_on_and_both_ways_give_the_same_results(
    tmp_path: Path, model: Path, server: RunningServer
) -> None:
    source = write_input(tmp_path / "in")
    kill_and_go_on(source, tmp_path / "local", "--model", str(model))
    local = check_results(tmp_path / "local")
    before = server.metrics()
    count, whole = kill_and_go_on(source, tmp_path / "remote", "--server", server.address)
    remote = check_results(tmp_path / "remote")
    assert remote == local
    server.wait_for_metric("quire_num_requests_running", 0)
    ended = server.metrics()["quire_requests_total{length}"] - before["quire_requests_total{length}"]
    ended -= whole * (good := LINES - len(BAD))
    assert good <= ended <= good + 600, f"{count} results were there: what was in flight is all that ran twice"
    said = finish(start(source, tmp_path / "local", "--model", str(model)), LINES_FAILED)
    assert said.startswith(f"quire: nothing to do: {tmp_path / 'local'} has all 1000 results\n")


def write_openai_input(path: Path) -> Path:
    """Requests of both endpoints, of which the last four fail."""
    turns = [{"role": "user", "content": "Who are you?"}]
    text = {"model": "talker", "prompt": "ROMEO:", "seed": 3, "max_tokens": 9}
    asked = [
        ("completions", text),
        ("completions", text | {"prompt": ["ROMEO:", "JULIET:"], "n": 2, "logprobs": 2, "echo": True}),
        ("completions", text | {"stop": ["\n"], "max_tokens": 200}),
        ("chat/completions", {"messages": turns, "seed": 4, "max_completion_tokens": 12}),
        (
            "chat/completions",
            {"messages": turns, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 3},
        ),
        ("completions", text | {"temperature": 9}),
        ("completions", text | {"model": "gpt-5"}),
        ("chat/completions", {"messages": turns, "stream": True}),
        ("embeddings", {"input": "A"}),
    ]
    lines = [
        {"custom_id": f"n{i}", "method": "POST", "url": f"/v1/{endpoint}", "body": body}
        for i, (endpoint, body) in enumerate(asked)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def openai_results(output: Path) -> list[dict]:
    """Without ids and times, which no two runs have in common."""
    results = [json.loads(line) for line in output.read_text().splitlines()]
    for result in results:
        assert result.pop("id").startswith("batch_req_")
        response = result["response"] or {}
        assert bool(response.pop("request_id", "")) == (response.get("status_code") == 200)
        if response.get("status_code") == 200:
            del response["body"]["id"], response["body"]["created"]
    return results


def test_openais_lines_have_the_same_answers_on_a_server_as_on_an_engine(
    tmp_path: Path, model: Path, server: RunningServer
) -> None:
    source, local, remote = write_openai_input(tmp_path / "in"), tmp_path / "local", tmp_path / "remote"
    said = finish(start(source, local, "--model", str(model)), LINES_FAILED)
    assert "5 results and 4 errors" in said
    assert said.endswith("ids: 'n5', 'n6', 'n7', 'n8'\n")
    lines = local.read_text().splitlines(keepends=True)
    remote.write_text("".join(lines[:2]))
    assert "going on: 2 of 9 results are there" in finish(
        start(source, remote, "--server", server.address), LINES_FAILED
    )
    results = openai_results(local)
    assert openai_results(remote) == results
    assert [result["custom_id"] for result in results] == [f"n{i}" for i in range(9)]
    bodies = [result["response"]["body"] for result in results[:8]]
    assert [len(body["choices"]) for body in bodies[:5]] == [1, 4, 1, 1, 1]
    assert bodies[1]["choices"][2]["text"].startswith("JULIET:")
    assert bodies[2]["choices"][0] | {"text": ""} == {
        "text": "", "logprobs": None, "index": 0, "finish_reason": "stop", "stop_reason": "\n"
    }  # fmt: skip
    assert bodies[3]["usage"]["completion_tokens"] == 12
    assert len(bodies[4]["choices"][0]["logprobs"]["content"]) == 5
    assert [result["response"]["status_code"] for result in results[5:8]] == [400, 404, 400]
    assert [body["error"]["param"] for body in bodies[5:]] == ["temperature", "model", "stream"]
    assert results[8]["response"] is None
    assert "line 9: url is '/v1/embeddings'" in results[8]["error"]["message"]


def test_a_server_with_small_limits_is_served_in_smaller_calls(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", 60, frozenset())
    with source.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "word " * 2000}) + "\n")
    with running_server("--max-batch-requests", "8", "--max-message-bytes", "4KiB") as server:
        said = finish(start(source, tmp_path / "out", "--server", server.address), LINES_FAILED)
        again = finish(start(source, tmp_path / "out", "--server", server.address, "--allow-errors"))
    assert "60 results and 1 errors" in said
    failed = f"quire: lines that failed: 1, each with its \"error\" in {tmp_path / 'out'}; ids: 'long'\n"
    assert said.endswith(failed)
    assert again.endswith(failed)
    last = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    assert last["id"] == "long"
    assert "larger than max" in last["error"]["message"]


def test_a_server_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in", 300, frozenset()), tmp_path / "out"
    with running_server() as first:
        port = first.address.rpartition(":")[2]
        job = start(source, output, "--server", first.address)
        wait_results(job, output, 50)
        first.process.kill()
        first.process.wait()
    with running_server("--port", port):
        assert "300 results and 0 errors" in finish(job)
    check_results(output, 300, frozenset())


def test_a_job_outlives_its_engine(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in", 150, frozenset(), tokens=20), tmp_path / "out"
    # eight at a time: when the first results come, nearly all of the work is still to be done
    job = start(source, output, "--engine", "process", "--max-sequences", "8")
    wait_results(job, output, 1)
    (engine,) = [c for c in psutil.Process(job.pid).children() if "rpc.engines.engine_process" in c.cmdline()]
    engine.kill()
    said = finish(job)
    assert "engine 0 has failed" in said
    assert "150 results and 0 errors" in said
    check_results(output, 150, frozenset(), tokens=20)


@pytest.mark.slow
def test_interrupt_stops_the_job_and_says_how_to_go_on(tmp_path: Path) -> None:
    # Ten times as many as run at once: what runs at once ends at once, too.
    source, output = write_input(tmp_path / "in", 320, frozenset(), tokens=20), tmp_path / "out"
    job = start(source, output, "--max-sequences", "32")
    wait_results(job, output, 20)
    job.send_signal(signal.SIGINT)
    assert "stopped. The same command goes on" in finish(job, 130)
    assert "going on: " in finish(start(source, output))
    check_results(output, 320, frozenset(), tokens=20)


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in", 3, frozenset()), tmp_path / "out"
    assert "no server answers at 127.0.0.1:1" in finish(start(source, output, "--server", "127.0.0.1:1"), 1)
    assert "leave --server out, or --model" in finish(start(source, output, "--server", "x:1", "--model", "demo"), 2)
    assert "no such directory" in finish(start(source, output, "--model", "/nowhere"), 1)
    assert "does not exist" in finish(start(tmp_path / "none", output), 2)
    output.write_text('{"id": "other"}\n')
    assert "Is it another job's? Name another --output" in finish(start(source, output), 1)
