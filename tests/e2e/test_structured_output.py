"""Structured output through real servers: unchanged clients, the command line, and an engine that is killed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import jsonschema
import openai
import psutil
import pytest
from pydantic import BaseModel, Field
from quire import Client, InvalidRequestError
from quire.v1 import admin_service_pb2 as admin
from quire.v1 import admin_service_pb2_grpc as admin_grpc
from quire.v1 import generation_service_pb2 as pb
from tokenizers import Tokenizer

from tests.support.checkpoints import write_llama
from tests.support.forking import run_quire
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.server import RunningServer, running_server
from tests.support.tagged_text import Tagged

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
MODEL = "tiny"


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)


NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 150, "maxItems": 150}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = write_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.add_special_tokens(["<|stop|>"])
    library.save(str(directory / "tokenizer.json"))
    flags = ("--model", str(directory), "--served-model-name", MODEL, "--kv-cache-memory", "64MiB", "--replicas", "2")
    with running_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway([server.address]) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_openais_client_parses_what_it_gets(gateway: RunningGateway, temperature: float) -> None:
    with gateway.client() as client:
        messages = [{"role": "user", "content": "Who?"}]
        asked = {"model": MODEL, "messages": messages, "temperature": temperature, "seed": 3, "max_tokens": 400}
        answer = client.chat.completions.parse(response_format=Person, **asked)
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(response_format=Person, **asked) as stream:
            streamed = stream.get_final_completion()
        assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed
        free = client.chat.completions.create(response_format={"type": "json_object"}, **(asked | {"max_tokens": 9}))
        assert (free.choices[0].message.content or "").startswith("{")


def test_completions_take_vllms_field(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 40, "temperature": 1.0}
        answer = client.completions.create(extra_body={"structured_outputs": {"regex": "[a-c]{9}"}}, **asked)
        assert re.fullmatch("[a-c]{9}", answer.choices[0].text)


CALLS = Tagged(
    ("<function=",), (("<function=who>", Person.model_json_schema(), "</function>"), ("<function=id>", "[a-f]+", ";")),
    at_least_one=True,
)  # fmt: skip


def test_vllms_structural_tags(gateway: RunningGateway, server: RunningServer, tmp_path: Path) -> None:
    """In each way in, up to any number of tokens, of which the last may be in the middle of a tag."""
    asked = {"model": MODEL, "temperature": 2.0}
    with gateway.client() as client:
        for most in (60, 61, 75, 90, 120):
            chat = client.chat.completions.create(
                messages=[{"role": "user", "content": "Who?"}], extra_body={"response_format": CALLS.newer()},
                max_tokens=most, seed=most, **asked,
            )  # fmt: skip
            assert CALLS.read(chat.choices[0].message.content or "")
            given = {"structural_tag": json.dumps(CALLS.newer())}
            plain = client.completions.create(
                prompt="a", extra_body={"structured_outputs": given}, max_tokens=most, seed=most, **asked
            )
            assert CALLS.read(plain.choices[0].text)
        wrong = {"type": "structural_tag", "triggers": ["<"]}
        wrong |= {"structures": [{"begin": "<a>", "schema": {"not": {}}, "end": "</a>"}]}
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(prompt="a", extra_body={"response_format": wrong}, **asked)
    assert refused.value.param == "response_format.structures[0].schema"
    assert "response_format.structures[0].schema is 'its content': Unimplemented keys" in str(refused.value)
    file = tmp_path / "tags.json"
    file.write_text(json.dumps(CALLS.newer()))
    command = ("generate", "Who?", "--server", server.address, "--quiet", "--seed", "3", "--max-tokens", "70")
    done = run_quire(*command, "--structural-tag", str(file))
    assert CALLS.read(done.stdout.removesuffix("\n")), done.stderr


def test_what_cannot_be_kept_is_refused_by_name(gateway: RunningGateway, server: RunningServer) -> None:
    schema = {"type": "array", "uniqueItems": True}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "response_format": named}
    with gateway.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    assert refused.value.param == "response_format"
    assert 'Unimplemented keys: ["uniqueItems"]' in str(refused.value)
    with Client(server.address) as own, pytest.raises(InvalidRequestError) as plain:
        own.generate("a", structured_output={"json_schema": schema})
    assert plain.value.field == "spec.structured_output.json_schema"


def test_it_closes_in_time_or_is_refused_at_the_door(server: RunningServer) -> None:
    schema = {"structured_output": {"json_schema": Person.model_json_schema()}, "temperature": 2.0}
    with Client(server.address) as own:
        with pytest.raises(InvalidRequestError, match="the shortest output that keeps the constraint") as no:
            own.generate("Who?", max_tokens=3, **schema)
        assert no.value.field == "spec.stopping.max_tokens"
        found = re.search("has ([0-9]+) tokens", str(no.value))
        assert found is not None
        least = int(found[1])
        for most in (least, least + 1, least + 5):
            for seed in range(4):
                response = own.generate("Who?", max_tokens=most, seed=seed, **schema)
                (made,) = response.sequences
                assert Person.model_validate_json(made.text)
                # With the end token it takes one more than its text has.
                assert made.finish_reason in (pb.FINISH_REASON_CLOSED, pb.FINISH_REASON_STOP)
                took_all = response.usage.completion_tokens == most
                assert took_all or made.finish_reason == pb.FINISH_REASON_STOP
        several = own.generate("Who?", max_tokens=least, sequence_count=3, seed=1, **schema).sequences
        assert {one.finish_reason for one in several} == {pb.FINISH_REASON_CLOSED}


def test_openais_client_parses_what_was_closed_in_time(gateway: RunningGateway) -> None:
    """It refuses the finish reason length."""
    asked = {"model": MODEL, "temperature": 2.0, "extra_body": {"top_k": 0}}
    with gateway.client() as client:
        for seed in range(3):
            answer = client.chat.completions.parse(
                messages=[{"role": "user", "content": "Who?"}],
                response_format=Person,
                max_tokens=30,
                seed=seed,
                **asked,
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 30, "it took all of its tokens"
            assert isinstance(answer.choices[0].message.parsed, Person)
            assert answer.choices[0].finish_reason == "stop"
        made = client.responses.parse(input="Who?", text_format=Person, max_output_tokens=30, model=MODEL)
        assert (made.status, isinstance(made.output_parsed, Person)) == ("completed", True)


def test_a_stop_string_ends_a_complete_output_alone(gateway: RunningGateway, server: RunningServer) -> None:
    """The same output as without it, up to the first one behind a complete text, streamed or whole."""
    words = "[a-z]{3}([.,][a-z]{3})*"
    asked = {"structured_output": {"regex": words}, "temperature": 2.0, "max_tokens": 200}
    with Client(server.address) as own:
        for seed in range(4):
            whole = own.generate("Who?", seed=seed, **asked).sequences[0].text
            stops = [whole[1:3], whole[2:5]]  # the first stands where the text before it is no word
            (made,) = own.generate("Who?", seed=seed, stop=stops, **asked).sequences
            places = [i for stop in stops for i in range(len(whole)) if whole.startswith(stop, i)]
            complete = [i for i in places if re.fullmatch(words, whole[:i])]
            assert made.text == (whole[: min(complete)] if complete else whole)
            with own.stream("Who?", seed=seed, stop=stops, **asked) as stream:
                assert "".join(stream.text()) == made.text
        again = own.generate("Who?", seed=1, stop=["."], **asked).sequences[0]
        assert again.text == own.generate("Who?", seed=1, **asked).sequences[0].text.split(".")[0]
    with gateway.client() as client:
        chat = client.completions.create(
            model=MODEL, prompt="Who?", seed=1, temperature=2.0, max_tokens=200, stop=["."],
            extra_body={"structured_outputs": {"regex": words}},
        )  # fmt: skip
        assert chat.choices[0].text == again.text


def test_a_stop_token_ends_a_complete_output_alone(gateway: RunningGateway, server: RunningServer) -> None:
    asked = {"structured_output": {"regex": "[a-z]{3,90}"}, "max_tokens": 200}
    with Client(server.address) as own:
        (stop,) = own.tokenize("<|stop|>")
        for temperature in (0.0, 1.0):
            (made,) = own.generate(
                "Who?", temperature=temperature, seed=1, stop_token_ids=[stop], logit_bias={stop: 100}, **asked
            ).sequences
            assert re.fullmatch("[a-z]{3,12}", made.text)
            assert (made.finish_reason, made.stop_token_id) == (pb.FINISH_REASON_STOP, stop)
        for beside, field in (({"stop_token_ids": [70]}, "stop_token_ids[0]"), ({"ignore_eos": True}, "ignore_eos")):
            with pytest.raises(InvalidRequestError) as refused:
                own.generate("Who?", **asked, **beside)
            assert refused.value.field == f"spec.stopping.{field}"
    with gateway.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="Who?", seed=1, max_tokens=200, logit_bias={str(stop): 100},
            extra_body={"structured_outputs": {"regex": "[a-z]{3,90}"}, "stop_token_ids": [stop]},
        ).choices[0]  # fmt: skip
        assert re.fullmatch("[a-z]{3,12}", answer.text)
        assert (answer.finish_reason, answer.model_extra) == ("stop", {"stop_reason": stop})


def test_the_command_line(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(Person.model_json_schema()))
    command = ("generate", "Who?", "--server", server.address, "--quiet", "--seed", "3")
    done = run_quire(*command, "--json-schema", str(file))
    assert done.returncode == 0, done.stderr
    assert Person.model_validate_json(done.stdout)
    done = run_quire(*command, "--choice", "yes", "--choice", "no")
    assert done.stdout.strip() in ("yes", "no")
    done = run_quire(*command, "--regex", "(a")
    assert (done.returncode, "structured_output.regex is '(a': unclosed group" in done.stderr) == (1, True)


def test_a_stream_keeps_it_when_its_engine_is_killed(server: RunningServer) -> None:
    """With the same tokens: those that a client has go through the grammar of another engine."""
    options = {"structured_output": {"json_schema": NUMBERS}, "temperature": 1.0, "seed": 7, "max_tokens": 1500}
    with Client(server.address) as client:
        wanted = client.generate("Numbers:", **options).sequences[0].text
        jsonschema.validate(json.loads(wanted), NUMBERS)
        for _ in range(2):
            with client.stream("Numbers:", **options) as stream:
                pieces = stream.text()
                text = next(pieces)
                running_engine(server).kill()
                text += "".join(pieces)
            assert text == wanted
            server.wait_for_metric("quire_replicas", 2)
        server.wait_for_metric('quire_requests_moved_total{cause="engine_lost"}', 2)


def running_engine(server: RunningServer) -> psutil.Process:
    """The engine that has the only request."""
    with grpc.insecure_channel(server.admin) as channel:
        replicas = admin_grpc.AdminServiceStub(channel).ListReplicas(admin.ListReplicasRequest()).replicas
    (busy,) = (replica for replica in replicas if replica.request_count)
    return psutil.Process(int(busy.place.split()[-1]))
