"""`quire serve --model sim:...` with real clients: every way in, streams that outlive engines, and its figures."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from openai import OpenAI
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_grpc

from rpc.engines.recordings import read_recording
from scheduler.replaying import Replay
from tests.support.forking import run_quire
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.processes import tree, wait_until
from tests.support.server import RunningServer, quire, running_frontend, running_server, stream_request
from tests.support.watching_client import histories_of, outputs_of, until_running, watching

MODEL = "sim:llama-3.1-8b-h100"
REPLICAS, STREAMS, TOKENS = 2, 8, 300
FLAGS = ("--model", MODEL, "--sim-speed", "4")
ENGINE = "rpc.engines.engine_process"
LOST = 'quire_requests_moved_total{cause="engine_lost"}'


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*FLAGS, "--replicas", str(REPLICAS)) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway([server.address]) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[dict]:
    """Results of undisturbed streams."""
    return streamed(server)


def streamed(server: RunningServer) -> list[dict]:
    process = watching(server.address, STREAMS, TOKENS)
    until_running(process)
    return outputs_of(histories_of(process, STREAMS))


def engines(server: RunningServer) -> list[psutil.Process]:
    return [process for process in tree(server.process.pid) if ENGINE in process.cmdline()]


def all_serve(server: RunningServer) -> bool:
    with grpc.insecure_channel(server.admin) as channel:
        replicas = admin_grpc.AdminServiceStub(channel).ListReplicas(admin_pb.ListReplicasRequest()).replicas
        return [replica.state for replica in replicas] == [admin_pb.REPLICA_STATE_SERVING] * REPLICAS


def test_it_says_that_no_model_answers(server: RunningServer) -> None:
    assert server.model == MODEL
    with grpc.insecure_channel(server.address) as channel:
        (model,) = model_grpc.ModelServiceStub(channel).ListModels(model_pb.ListModelsRequest()).models
    assert (model.name, model.architecture, model.dtype) == (MODEL, "simulated", "no weights")
    assert run_quire("models", "--server", server.address).stdout.startswith(MODEL)


def test_streams_of_a_killed_engine_go_on_with_the_same_tokens(server: RunningServer, expected: list[dict]) -> None:
    wait_until(lambda: all_serve(server), "all replicas")
    process = watching(server.address, STREAMS, TOKENS)
    until_running(process)
    engines(server)[1].send_signal(signal.SIGKILL)
    assert outputs_of(histories_of(process, STREAMS)) == expected
    wait_until(lambda: all_serve(server), "all replicas")


def write_faults(directory: Path, *faults: dict) -> tuple[str, str]:
    """Returns the flag of a server that has these faults."""
    path = directory / "faults.json"
    path.write_text(json.dumps(faults))
    return "--sim-faults", str(path)


def test_streams_over_a_scheduled_kill_go_on_with_the_same_tokens(tmp_path: Path, expected: list[dict]) -> None:
    """The first engine is so slow that no stream ends before it is killed.

    Where the machine is slow too, and no stream began before, streams come again until a later kill meets some.
    """
    kills = [{"at": at, "kind": "kill", "engine": 0} for at in range(5, 250, 7)]
    slow = {"at": 0, "kind": "slow", "engine": 0, "seconds": 3600, "factor": 100}
    flags, log = write_faults(tmp_path, slow, *kills), tmp_path / "log"
    with log.open("w") as stderr, running_server(*FLAGS, *flags, stderr=stderr) as server:
        while server.metrics()[LOST] == 0:
            assert streamed(server) == expected
        text = log.read_text()
    assert 1 <= text.count("engine 0 has failed") <= text.count("engine 0: kill, as --sim-faults says")


def test_streams_of_a_stalled_engine_go_on_with_the_same_tokens(tmp_path: Path, expected: list[dict]) -> None:
    """A step does not return once the watchdog knows how long steps take, which it hears of the first streams."""
    flags = write_faults(tmp_path, {"at": 3, "kind": "stall", "engine": 0, "seconds": 3600})
    with running_server(*FLAGS, *flags) as server:
        while server.metrics()[LOST] == 0:
            assert streamed(server) == expected
        assert server.metrics()["quire_engine_starts_total"] == 2


def test_a_drain_moves_streams_with_the_same_tokens(server: RunningServer, expected: list[dict]) -> None:
    wait_until(lambda: all_serve(server), "all replicas")
    process = watching(server.address, STREAMS, TOKENS)
    until_running(process)
    for command in ("drain", "resume"):
        done = run_quire("admin", command, "0", "--server", server.admin)
        assert done.returncode == 0, done.stderr
    assert outputs_of(histories_of(process, STREAMS)) == expected


def test_a_prefix_is_found_in_the_cache(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        prompt = list(range(300, 500))
        usages = [
            server.stub(channel).Generate(pb.GenerateRequest(spec=stream_request([*prompt, more], 2).spec)).usage
            for more in range(2)
        ]
    assert [usage.cached_prompt_tokens for usage in usages] == [0, 192]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b"]}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert isinstance(person["name"], str)
    assert isinstance(person["age"], int)
    assert person["tags"] in ("a", "b")


def test_constrained_outputs_keep_their_schema(gateway: RunningGateway) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    messages = [{"role": "user", "content": "Who?"}]
    with gateway.client() as client:
        for seed in range(6):
            asked = {"model": MODEL, "messages": messages, "seed": seed, "response_format": form}
            greedy = {"temperature": 0.0} if seed == 0 else {}
            (choice,) = client.chat.completions.create(**asked, **greedy, max_tokens=100).choices
            check_person(choice.message.content or "")
            (choice,) = client.chat.completions.create(**asked, **greedy).choices
            assert choice.finish_reason == "stop", "where the model ends its output, not at the end of the context"
            check_person(choice.message.content or "")


def test_calls_that_are_asked_for_keep_their_schema(gateway: RunningGateway) -> None:
    tool = {"type": "function", "function": {"name": "greet", "parameters": PERSON, "strict": True}}
    messages = [{"role": "user", "content": "Who?"}]
    with gateway.client() as client:
        (choice,) = client.chat.completions.create(
            model=MODEL, messages=messages, seed=3, tools=[tool], tool_choice="required", max_tokens=400
        ).choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or ():
        assert call.function.name == "greet"
        check_person(call.function.arguments)
    assert choice.message.tool_calls


def test_openai_clients_get_conversations_logprobs_and_several_answers(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        talk(client)


def talk(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    messages = [{"role": "user", "content": "Hello"}]
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=30, n=2, seed=1, logprobs=True, top_logprobs=3
        )
        for _ in range(2)
    ]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 2
    content = answers[0].choices[0].logprobs.content
    assert {len(token.top_logprobs) for token in content or ()} == {3}
    stop = texts[0][0].split()[2]
    cut = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, seed=1, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == texts[0][0].partition(stop)[0]
    pieces = client.completions.create(model=MODEL, prompt="ROMEO:", max_tokens=9, seed=2, stream=True)
    whole = client.completions.create(model=MODEL, prompt="ROMEO:", max_tokens=9, seed=2)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text


@pytest.mark.parametrize("protocol", ["quire", "inference", "openai"])
def test_a_load_is_answered_on_every_protocol(
    server: RunningServer, gateway: RunningGateway, tmp_path: Path, protocol: str
) -> None:
    file = tmp_path / "run.json"
    to = f"{gateway.url}/v1" if protocol == "openai" else server.address
    load = ("--requests", "8", "--rate", "50", "--output-tokens", "8", "--json", str(file))
    done = quire("bench", "serve", "--protocol", protocol, "--server", to, "--model", MODEL, *load)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    assert (figures["ok"], figures["failed"], figures["output_tokens"]) == (8, 0, 64)


def test_the_monitor_shows_its_name(server: RunningServer) -> None:
    shown = run_quire("top", "--once", "--server", server.admin)
    assert f"{MODEL}  simulated" in shown.stdout, shown.stderr


def test_a_recording_of_it_replays(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    with running_server(*FLAGS, "--sim-output-tokens", "20", "--record", str(path)) as server:
        streamed(server)
    assert Replay(read_recording(path)).run() is None


def test_a_thread_and_a_process_give_the_same(expected: list[dict]) -> None:
    """The other speed changes no token."""
    with running_server("--model", MODEL, "--sim-speed", "20", "--max-sequences", "4") as server:
        assert streamed(server) == expected


def test_another_frontend_uses_its_engines(tmp_path: Path, expected: list[dict]) -> None:
    join = f"unix:{tmp_path}/join"
    with running_server(*FLAGS, "--join-address", join), running_frontend(join, "--model", MODEL) as guest:
        assert guest.model == MODEL
        assert streamed(guest) == expected


def test_a_profile_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": "quire-profile", "version": 2}))
    for model, said in ((f"sim:{path}", f"{path}: is no profile"), ("sim:none", "none is neither a file nor one of")):
        done = run_quire("serve", "--model", model)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert said in done.stderr
