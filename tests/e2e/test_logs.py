"""Log lines as JSON: each line of any of a server's processes is an object, and none has a prompt."""

import json
import subprocess

import grpc
import pytest

from tests.support.forking import Quire
from tests.support.processes import started_server, when_ready
from tests.support.server import READY, RunningServer, clean_environment, stream_request

PROMPT = "Wherefore art thou a prompt that nobody logs"


def lines_of(*flags: str) -> list[dict]:
    """Returns the lines that a server with these flags wrote to standard error while it served a request."""
    line = ["serve", "--port", "0", "--metrics-port", "0", "--admin-port", "0", "--log-format", "json", *flags]
    process = Quire(*line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment())
    try:
        assert process.stdout is not None
        found = READY.search(process.stdout.readline())
        assert found is not None
        server = RunningServer(process, *found.groups())
        with grpc.insecure_channel(server.address) as channel:
            request = stream_request(PROMPT, 5)
            request.request_id = "the-request"
            list(server.stub(channel).StreamGenerate(request, timeout=60))
            request.request_id = "refused"
            request.spec.sampling.top_p = 7
            with pytest.raises(grpc.RpcError):
                list(server.stub(channel).StreamGenerate(request, timeout=60))
            request.request_id = "unreadable"
            request.stream_options.max_delay.nanos = -1
            with pytest.raises(grpc.RpcError):
                list(server.stub(channel).StreamGenerate(request, timeout=60))
        process.terminate()
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert PROMPT not in said
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (("--engine", "thread"), {("server", None)}),
        (("--engine", "process"), {("server", None), ("engine", None)}),
        (("--tensor-parallel", "2"), {("server", None), ("engine", 1)}),
        pytest.param(("--ray",), {("server", None)}, marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_lines_are_objects_and_say_who_wrote_them(flags: tuple[str, ...], processes: set) -> None:
    lines = lines_of(*flags)
    assert all({"timestamp", "level", "logger", "process", "message"} <= line.keys() for line in lines)
    assert processes <= {(line["process"], line.get("rank")) for line in lines}
    assert any(line["message"].startswith("draining") for line in lines)
    assert not any(line["logger"] == "quire.requests" for line in lines), "they were not asked for"


def test_requests_are_logged_where_it_is_asked_for() -> None:
    lines = [line for line in lines_of("--log-requests") if line["logger"] == "quire.requests"]
    ends = [(line["request_id"], line["outcome"]) for line in lines]
    assert ends == [("the-request", "length"), ("refused", "invalid_field"), ("unreadable", "invalid_field")]
    line = lines[0]
    assert (line["request_id"], line["tenant"], line["outcome"]) == ("the-request", "default", "length")
    assert (line["completion_tokens"], line["submissions"], line["attempt"]) == (5, 1, 1)
    assert lines[1]["attempt"] == 0, "it came to no engine"
    assert line["queue_seconds"] + line["prefill_seconds"] == pytest.approx(line["first_token_seconds"])
    assert line["first_token_seconds"] + line["decode_seconds"] <= line["seconds"]
    assert min(line[f"{phase}_seconds"] for phase in ("queue", "prefill", "decode")) > 0
    assert line["message"].startswith("request the-request of default: length, ")


@pytest.mark.slow
def test_rays_actors_write_lines_of_their_own_without_colours() -> None:
    """Ray's own choice is to hold back a line that another actor has written, with a note in green."""
    engines = ("--replicas", "2", "--kv-cache-memory", "64MiB")
    with started_server("--ray", *engines) as process:
        when_ready(process)
        assert process.stderr is not None
        said = ""
        while said.count("quire: KV cache: ") < 2:
            line = process.stderr.readline()
            assert line, f"the server ended, and said {said}"
            said += line
        process.terminate()
        said += process.communicate(timeout=60)[1]
    assert "\x1b" not in said
    assert "[repeated" not in said
