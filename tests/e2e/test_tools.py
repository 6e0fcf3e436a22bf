"""Tool calls and reasoning through real servers: unchanged clients, turns with results, an engine that is killed."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import openai
import psutil
import pytest
from quire import LLM, Client, InvalidRequestError, Stopping
from quire.v1 import admin_service_pb2 as admin
from quire.v1 import admin_service_pb2_grpc as admin_grpc
from quire.v1 import generation_service_pb2 as pb

from rpc.client.specs import spec_of
from tests.support.chats import TOOLED
from tests.support.checkpoints import write_llama
from tests.support.forking import run_quire
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.server import RunningServer, running_server

MODEL = "tiny"
CITIES = ["Oslo", "Rome", "Ulm"]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": PLACE, "now": NOW}
OWN = [{"name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()]
OPENAIS: Any = [{"type": "function", "function": one} for one in OWN]
ASK: list[Any] = [{"role": "user", "content": "Rain?"}]
ASKED: dict[str, Any] = {"model": MODEL, "tools": OPENAIS, "temperature": 1.0, "max_tokens": 400}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    (directory / "chat_template.jinja").write_text(TOOLED)
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    flags = ("--model", str(directory), "--served-model-name", MODEL, "--kv-cache-memory", "64MiB", "--replicas", "2")
    with running_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway([server.address]) as running:
        yield running


def check(calls: Any) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_openais_client_gets_calls_streamed_and_whole(gateway: RunningGateway, seed: int) -> None:
    with gateway.client() as client:
        asked = {**ASKED, "messages": ASK, "tool_choice": "required", "seed": seed, "parallel_tool_calls": seed > 1}
        choice = client.chat.completions.create(**asked).choices[0]
        calls = choice.message.tool_calls
        assert calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        check(calls)
        assert len({call.id for call in calls}) == len(calls)
        assert seed > 1 or len(calls) == 1
        with client.chat.completions.stream(**asked) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in events
        found = [(call.id, call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
        assert found == [(call.id, call.function.name, call.function.arguments) for call in calls]  # type: ignore[union-attr]
        assert streamed.finish_reason == "tool_calls"


def test_the_result_comes_back_in_the_next_turn(gateway: RunningGateway, server: RunningServer) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    with gateway.client() as client:
        first = client.chat.completions.create(messages=ASK, tool_choice=named, seed=1, **ASKED).choices[0].message  # type: ignore[call-overload]
        (call,) = first.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})
        turns = [*ASK, first, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
        again = {**ASKED, "messages": turns, "tool_choice": "required", "seed": 1, "parallel_tool_calls": False}
        second = client.chat.completions.create(**again)
        ours = second.choices[0].message.tool_calls[0]
        assert ours.id != call.id, "no two calls of a conversation have one id, whatever the seed"
    with Client(server.address) as own:
        turn = {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "name": "now", "arguments": "{}"}]}
        turns = [*ASK, turn, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
        same = own.generate(
            turns, tools=OWN, tool_choice="required", seed=1, temperature=1.0, max_tokens=400, parallel_tool_calls=False
        )
        (made, *_) = same.sequences[0].tool_calls
        assert (made.name, made.arguments, made.id) == (ours.function.name, ours.function.arguments, ours.id)
        assert same.sequences[0].text == ""


def test_calls_that_are_closed_at_max_tokens_are_calls(gateway: RunningGateway, server: RunningServer) -> None:
    """Also the shortest: with one token less the request is refused."""
    asked = {"tools": OWN, "tool_choice": "required", "temperature": 2.0}
    with Client(server.address) as own:
        with pytest.raises(InvalidRequestError, match=r"has ([0-9]+) tokens") as refused:
            own.generate(ASK, max_tokens=1, **asked)
        least = int(re.findall(r"has ([0-9]+) tokens", str(refused.value))[0])
        closed = 0
        for most in range(least, least + 12):
            (made,) = own.generate(ASK, max_tokens=most, seed=most, **asked).sequences
            for call in made.tool_calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            assert made.tool_calls
            assert made.finish_reason in (pb.FINISH_REASON_CLOSED, pb.FINISH_REASON_STOP)
            closed += made.finish_reason == pb.FINISH_REASON_CLOSED
        assert closed
    with gateway.client() as client:
        (choice,) = client.chat.completions.create(
            **{**ASKED, "messages": ASK, "tool_choice": "required", "seed": least, "max_tokens": least}
        ).choices
        assert choice.finish_reason == "tool_calls"
        check(choice.message.tool_calls)


def test_lines_of_a_batch_call_tools(server: RunningServer, tmp_path: Path) -> None:
    """The calls of a line are those that a client gets; they go back in another line."""
    first = {"messages": ASK, "tools": OWN, "tool_choice": "required", "sampling": {"seed": 3, "temperature": 1.0}}
    (line,) = batch(server, tmp_path, {**first, "stopping": {"max_tokens": 400}})
    with Client(server.address) as own:
        asked = {"tools": OWN, "tool_choice": "required", "seed": 3, "temperature": 1.0, "max_tokens": 400}
        (same,) = own.generate(ASK, **asked).sequences
    calls = line["tool_calls"]
    assert calls == [{"id": one.id, "name": one.name, "arguments": one.arguments} for one in same.tool_calls]
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    assert (line["text"], line["finish_reason"]) == ("", "stop")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3 mm"} for call in calls]
    turns = [*ASK, {"role": "assistant", "tool_calls": calls}, *results]
    wrong = {**first, "messages": turns, "tool_name": "other"}
    answered, failed = batch(server, tmp_path, {**first, "messages": turns, "tool_name": "now"}, wrong, code=3)
    assert answered["tool_calls"]
    assert all((call["name"], json.loads(call["arguments"])) == ("now", {}) for call in answered["tool_calls"])
    assert "chat.tool_name" in failed["error"]["message"]


def batch(server: RunningServer, folder: Path, *lines: dict[str, Any], code: int = 0) -> list[dict[str, Any]]:
    """Runs a batch job of some lines, and returns its results."""
    source, output = folder / f"in{len(lines)}.jsonl", folder / f"out{len(lines)}.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_quire("batch", "--server", server.address, "--input", str(source), "--output", str(output))
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_calls_are_not_forced_where_nothing_is_strict(gateway: RunningGateway) -> None:
    loose = [{"type": "function", "function": {"name": "now"}}]
    with gateway.client() as client:
        free = {"model": MODEL, "messages": ASK, "max_tokens": 30, "temperature": 0, "stop": ["\x00\x01"]}
        without = client.chat.completions.create(tools=loose, tool_choice="none", **free).choices[0]  # type: ignore[call-overload]
        allowed = client.chat.completions.create(tools=loose, **free).choices[0]  # type: ignore[call-overload]
        assert allowed.message.content.strip() == without.message.content.strip()
        assert allowed.message.tool_calls is None


def test_what_cannot_be_kept_is_refused_by_name(gateway: RunningGateway, server: RunningServer) -> None:
    bad = {"name": "bad", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}, "strict": True}
    with gateway.client() as client:
        tools: Any = [*OPENAIS, {"type": "function", "function": bad}]
        with pytest.raises(openai.BadRequestError, match="not"):
            client.chat.completions.create(model=MODEL, messages=ASK, tools=tools)
        for beside, param in (({"stop_token_ids": [7]}, "stop_token_ids[0]"), ({"ignore_eos": True}, "ignore_eos")):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(messages=ASK, extra_body=beside, **ASKED)
            assert refused.value.param == param
        for tool_choice in ("required", {"type": "function", "function": {"name": "none"}}):
            with pytest.raises(openai.BadRequestError, match="tool"):
                client.chat.completions.create(model=MODEL, messages=ASK, tool_choice=tool_choice, tools=[])  # type: ignore[call-overload]
    with Client(server.address) as own:
        with pytest.raises(InvalidRequestError) as named:
            own.generate(ASK, tools=[*OWN, bad])
        assert named.value.field == "spec.chat.tools[2].parameters"
        with pytest.raises(InvalidRequestError) as unknown:
            own.generate(ASK, tools=OWN, tool_choice="required", tool_name="other")
        assert unknown.value.field == "spec.chat.tool_name"
        turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "now", "arguments": "[]"}]}
        with pytest.raises(InvalidRequestError) as argument:
            own.generate([*ASK, turn], tools=OWN)
        assert argument.value.field == "spec.chat.messages[1].tool_calls[0].arguments"


def test_reasoning_stands_apart_and_is_bounded(gateway: RunningGateway, server: RunningServer) -> None:
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5}}
    with gateway.client() as client:
        asked: dict[str, Any] = {**ASKED, "messages": ASK, "tool_choice": "required", "seed": 4, **thinking}
        answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message
        assert message.tool_calls
        check(message.tool_calls)
        assert 0 < len(message.reasoning_content) <= 5 * 4  # type: ignore[attr-defined]
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert 5 <= answer.usage.completion_tokens_details.reasoning_tokens <= 5 + len("</think>")
        chunks = list(client.chat.completions.create(stream=True, **asked))
        parts = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(getattr(part, "reasoning_content", "") for part in parts) == message.reasoning_content  # type: ignore[attr-defined]
        hidden = {**asked, "extra_body": {**thinking["extra_body"], "include_reasoning": False}}
        quiet = client.chat.completions.create(**hidden).choices[0].message
        assert not hasattr(quiet, "reasoning_content")
        assert quiet.tool_calls == message.tool_calls
    with Client(server.address) as own:
        options: dict[str, Any] = {"seed": 4, "temperature": 1.0, "max_tokens": 60}
        spec = spec_of(ASK, reasoning={"max_tokens": 5}, **options)
        spec.chat.template_arguments["enable_thinking"] = "true"
        with own.stream_request(pb.StreamGenerateRequest(spec=spec)) as stream:
            deltas = [delta for message in stream for delta in message.deltas]
        spec.output.raw_text = True
        with own.stream_request(pb.StreamGenerateRequest(spec=spec)) as stream:
            raw = "".join(delta.text for message in stream for delta in message.deltas)
        reasoning, _, text = raw.partition("</think>")
        assert "".join(delta.reasoning for delta in deltas) == reasoning.strip()
        assert "".join(delta.text for delta in deltas).strip() == text.strip()


@pytest.mark.parametrize("budget", [None, 5])
def test_calls_and_answers_behind_reasoning_are_closed_in_time(gateway: RunningGateway, budget: int | None) -> None:
    """The random model would neither end its reasoning nor its texts."""
    texts = {"type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"],
             "additionalProperties": False}  # fmt: skip
    extra = {"chat_template_kwargs": {"enable_thinking": True}} | ({"thinking_token_budget": budget} if budget else {})
    tool = {"type": "function", "function": {"name": "say", "parameters": texts}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": texts}}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "temperature": 1.0,
        "max_tokens": 200,
        "extra_body": extra,
    }
    with gateway.client() as client:
        for seed in (1, 2):
            call = client.chat.completions.create(tools=[tool], tool_choice="required", seed=seed, **asked).choices[0]
            for made in call.message.tool_calls or [None]:
                jsonschema.validate(json.loads(made.function.arguments), texts)
            answer = client.chat.completions.create(response_format=form, seed=seed, **asked).choices[0]
            jsonschema.validate(json.loads(answer.message.content), texts)


def kill_running(server: RunningServer) -> bool:
    """Kills the engine that has the only request. Returns whether one had it still."""
    with grpc.insecure_channel(server.admin) as channel:
        replicas = admin_grpc.AdminServiceStub(channel).ListReplicas(admin.ListReplicasRequest()).replicas
    busy = [replica for replica in replicas if replica.request_count]
    for replica in busy:
        psutil.Process(int(replica.place.split()[-1])).kill()
    return bool(busy)


LONG = {  # 300 tokens and more, so that an engine is killed in the middle of it
    "type": "object",
    "properties": {f"number_{i}": {"type": "integer", "minimum": 10**8, "maximum": 10**9} for i in range(12)},
    "required": [f"number_{i}" for i in range(12)],
    "additionalProperties": False,
}
LONG_CALL = [{"name": "numbers", "parameters": LONG, "strict": True}]


def call_of(server: RunningServer, kill_at: int | None) -> tuple[tuple[str, str, str], bool]:
    """Id, name and arguments of a call, and whether its engine was killed. kill_at: tokens behind which it is."""
    count, parts, killed = 0, list[pb.ToolCallDelta](), False
    options: dict[str, Any] = {"seed": 9, "temperature": 1.0, "parallel_tool_calls": False, "tool_choice": "required"}
    with Client(server.address) as client, client.stream(ASK, tools=LONG_CALL, max_tokens=700, **options) as stream:
        for message in stream:
            for delta in message.deltas:
                count += delta.token_count
                parts += delta.tool_calls
            if kill_at is not None and count >= kill_at and not killed and not message.HasField("usage"):
                killed = kill_running(server)
    made = "".join(p.id for p in parts), "".join(p.name for p in parts), "".join(p.arguments for p in parts)
    return made, killed


@pytest.mark.parametrize("kill_at", [1, 14, 30])
def test_a_call_is_the_same_when_its_engine_is_killed(server: RunningServer, kill_at: int) -> None:
    wanted, _ = call_of(server, None)
    assert call_of(server, kill_at) == (wanted, True)
    server.wait_for_metric("quire_replicas", 2)


@pytest.mark.slow
def test_a_call_is_the_same_wherever_its_engine_is_killed(server: RunningServer) -> None:
    wanted, _ = call_of(server, None)
    kills = 0
    for kill_at in range(1, 40, 5):
        made, killed = call_of(server, kill_at)
        assert made == wanted, kill_at
        kills += killed
        server.wait_for_metric("quire_replicas", 2, 120)  # engines that die soon are started again ever later
    assert kills == 8


def test_in_the_callers_process(directory: Path) -> None:
    with closing(LLM(str(directory), kv_cache_memory=2**26)) as llm:
        (done,) = llm.chat([ASK], stopping=Stopping(max_tokens=400), tools=OPENAIS, tool_choice="required")
        assert done.text == ""
        assert done.tool_calls
        for call in done.tool_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
