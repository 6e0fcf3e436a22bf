"""Conversations through a real server: rendered with the model's template, whatever that template is."""

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from quire import LLM, RequestFailed, Sampling, Stopping
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import tokenization_service_pb2 as tokenization_pb
from quire.v1 import tokenization_service_pb2_grpc as tokenization_pb_grpc

from rpc.paths import demo_directory
from tests.support.chats import conversation
from tests.support.forking import run_quire
from tests.support.processes import find, is_alive, started_server, tree, wait_until, when_ready
from tests.support.server import RunningServer, clean_environment, details, running_server, stream_request

TEMPLATE = """{{ eos_token }}{% for message in messages %}
{% if message.content == 'loop' %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% elif message.content == 'fill' %}
{{ 'a' * 10**9 ~ message.content }}
{% elif message.content == 'much' %}
{% for i in range(70000) %}word {% endfor %}
{% elif message.role == 'system' %}
{{ raise_exception('there are no systems here') }}
{% endif %}
{{ message.role | upper }}:
{{ message.content }}
{% endfor %}
{% if mood is defined %}({{ mood }}){% endif %}
ASSISTANT:
"""
TURNS = conversation("romeo: What light é", "juliet: Ay me!", "romeo: She speaks.")
TEXT = "<|endoftext|>ROMEO:\nWhat light é\nJULIET:\nAy me!\nROMEO:\nShe speaks.\nASSISTANT:"
PROCESS = "chat_process"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = Path(shutil.copytree(demo_directory(), tmp_path_factory.mktemp("chat") / "talker"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    with running_server("--model", str(directory), "--kv-cache-memory", str(256 * 16 * 3072)) as running:
        yield running
    assert tree(running.process.pid) == []


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


def asked(turns: list[dict[str, str]], **arguments: str) -> pb.GenerationSpec:
    """Greedy, of ten tokens."""
    spec = stream_request("", 10, temperature=0).spec
    for turn in turns:
        spec.chat.messages.add(role=turn["role"], parts=[pb.ContentPart(text=turn["content"])])
    spec.chat.template_arguments.update(arguments)
    return spec


def generated(server: RunningServer, channel: grpc.Channel, spec: pb.GenerationSpec) -> list[int]:
    return list(server.stub(channel).Generate(pb.GenerateRequest(spec=spec)).sequences[0].token_ids)


def refused(server: RunningServer, channel: grpc.Channel, spec: pb.GenerationSpec) -> tuple[str, str]:
    """Reason and message."""
    with pytest.raises(grpc.RpcError) as error:
        generated(server, channel, spec)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = details(error.value)
    assert [v.field for v in found["BadRequest"].field_violations] == ["spec.chat"]
    return found["ErrorInfo"].reason, error.value.details()


def test_a_conversation_is_the_token_ids_of_its_text(server: RunningServer, channel: grpc.Channel) -> None:
    tokenizer = tokenization_pb_grpc.TokenizationServiceStub(channel)
    ids = tokenizer.Tokenize(tokenization_pb.TokenizeRequest(text=TEXT, add_special_tokens=False)).token_ids
    assert ids[0] == 0
    expected = generated(server, channel, stream_request(list(ids), 10, temperature=0).spec)
    assert generated(server, channel, asked(TURNS)) == expected
    whole = server.stub(channel).Generate(pb.GenerateRequest(spec=asked(TURNS)))
    assert whole.usage.prompt_tokens == len(ids)
    streamed = server.stub(channel).StreamGenerate(pb.StreamGenerateRequest(spec=asked(TURNS)))
    assert [token for message in streamed for token in message.deltas[0].token_ids] == expected


def test_parts_are_joined_and_arguments_are_json(server: RunningServer, channel: grpc.Channel) -> None:
    spec = asked(TURNS)
    spec.chat.messages[0].parts[0].text = "What light"
    spec.chat.messages[0].parts.add(text=" é")
    assert generated(server, channel, spec) == generated(server, channel, asked(TURNS))
    text = TEXT.replace("ASSISTANT:", "(sad 1)ASSISTANT:")
    moody = stream_request(text, 10, temperature=0).spec
    assert generated(server, channel, asked(TURNS, mood='"sad 1"')) == generated(server, channel, moody)


def test_what_a_template_refuses_or_does_fails_that_request(server: RunningServer, channel: grpc.Channel) -> None:
    expected = generated(server, channel, asked(TURNS))
    for turn, reason, message in (
        ("system: Be kind", "CHAT_REFUSED", "the model's chat template says: there are no systems here"),
        ("romeo: loop", "CHAT_LIMIT", "the model's chat template computes for more than 1 s"),
        ("romeo: fill", "CHAT_LIMIT", "the model's chat template needs more than 256 MiB"),
        ("romeo: much", "CHAT_LIMIT", "the model's chat template makes more than 65536 characters of this"),
        ("romeo: " + "word " * 2000, "INVALID_FIELD", "chat is '"),
    ):
        found = refused(server, channel, asked(conversation(turn)))
        assert found[0] == reason
        assert message in found[1]
        assert generated(server, channel, asked(TURNS)) == expected


def test_while_a_template_loops_text_is_served_and_conversations_after_it(
    server: RunningServer, channel: grpc.Channel
) -> None:
    expected = generated(server, channel, asked(TURNS))
    with ThreadPoolExecutor(12) as pool:
        loops = [pool.submit(refused, server, channel, asked(conversation("romeo: loop"))) for _ in range(3)]
        time.sleep(0.2)
        chats = [pool.submit(generated, server, channel, asked(TURNS)) for _ in range(6)]
        for _ in range(5):
            generated(server, channel, stream_request("A", 2, temperature=0).spec)
        assert not all(loop.done() for loop in loops)
        assert [chat.result() for chat in chats] == [expected] * 6
        assert {loop.result()[0] for loop in loops} == {"CHAT_LIMIT"}


def test_a_killed_process_is_replaced(server: RunningServer, channel: grpc.Channel) -> None:
    expected = generated(server, channel, asked(TURNS))
    process = find(server.process.pid, PROCESS)
    process.kill()
    assert generated(server, channel, asked(TURNS)) == expected
    assert find(server.process.pid, PROCESS).pid != process.pid


def test_a_batch_job_takes_messages(server: RunningServer, channel: grpc.Channel, tmp_path: Path) -> None:
    rest = {"sampling": {"temperature": 0}, "stopping": {"max_tokens": 10, "ignore_eos": True}}
    lines = [
        {"id": "a", "messages": TURNS} | rest,
        {"id": "b", "messages": conversation("system: x")} | rest,
        {"id": "c", "messages": TURNS, "template_arguments": {"mood": "sad 1"}} | rest,
    ]
    (tmp_path / "in").write_text("\n".join(json.dumps(line) for line in lines))
    command = ["batch", "--server", server.address, "--input", str(tmp_path / "in")]
    done = run_quire(*command, "--output", str(tmp_path / "out"), env=clean_environment())
    assert done.returncode == 3, "a line failed"
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert results[0]["token_ids"] == generated(server, channel, asked(TURNS))
    assert results[1]["error"]["reason"] == "CHAT_REFUSED"
    assert results[2]["token_ids"] == generated(server, channel, asked(TURNS, mood='"sad 1"'))


def test_the_command_line_sends_a_user_message(server: RunningServer, channel: grpc.Channel) -> None:
    command = ["generate", "Who?", "--server", server.address, "--chat", "--temperature", "0"]
    done = run_quire(*command, "--max-tokens", "10", env=clean_environment())
    assert done.returncode == 0, done.stderr
    spec = asked(conversation("user: Who?"))
    spec.stopping.ignore_eos = False
    answer = server.stub(channel).Generate(pb.GenerateRequest(spec=spec)).sequences[0].text
    assert done.stdout == answer + "\n"


def test_offline(directory: Path) -> None:
    greedy, stopping = Sampling(temperature=0), Stopping(max_tokens=10, ignore_eos=True)
    with LLM(str(directory), kv_cache_memory=64 * 2**20) as llm:
        chats = [TURNS, conversation("romeo: Who?")]
        together = llm.chat(chats, greedy, stopping)
        plain = llm.generate([TEXT, "<|endoftext|>ROMEO:\nWho?\nASSISTANT:"], greedy, stopping)
        assert [c.token_ids for c in together] == [c.token_ids for c in plain]
        (moody,) = llm.chat([TURNS], greedy, stopping, template_arguments={"mood": "sad 1"})
        assert moody.prompt_tokens > together[0].prompt_tokens
        for bad, message in (([], "chat.messages is '0 messages'"), (conversation("system: x"), "no systems here")):
            with pytest.raises(RequestFailed, match=message):
                llm.chat([bad])
    with LLM(kv_cache_memory=64 * 2**20) as plain_llm, pytest.raises(RequestFailed, match="has no chat template"):
        plain_llm.chat([TURNS])


def test_a_template_with_an_error_stops_the_start(directory: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(directory, tmp_path / "broken"))
    (broken / "chat_template.jinja").write_text("a\n{% if %}")
    command = ["serve", "--port", "0", "--metrics-port", "0", "--admin-port", "0", "--model", str(broken)]
    done = run_quire(*command, env=clean_environment())
    assert done.returncode == 1
    path = broken / "chat_template.jinja"
    assert f"quire: {path}: the model's chat template fails: line 2: Expected an expression" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_nothing_outlives_a_server_that_is_killed(directory: Path, engine: str) -> None:
    with started_server("--model", str(directory), "--engine", engine) as process:
        server = when_ready(process)
        template = find(process.pid, PROCESS)
        with grpc.insecure_channel(server.address) as channel:
            loop = server.stub(channel).Generate.future(pb.GenerateRequest(spec=asked(conversation("romeo: loop"))))
            wait_until(lambda: template.cpu_times().user > 0.2, "the template's loop")
            process.kill()
            wait_until(lambda: not is_alive(template), "the end of the template's process", 5)
            assert loop.exception() is not None
