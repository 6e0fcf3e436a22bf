"""Every refusal reaches the client as the right status with google.rpc details, and hurts no other request."""

import math
from collections.abc import Callable, Iterator

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from tests.support.server import RunningServer, details, running_server, stream_request

Change = Callable[[pb.GenerationSpec], object]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # One row and a queue of two, so that a full queue is easily made; 64 pages of 16 tokens.
    with running_server(
        "--max-sequences", "1", "--max-queue", "2", "--kv-cache-memory", str(64 * 16 * 3072), "--max-queue-time", "60"
    ) as running:
        yield running


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


def chat(spec: pb.GenerationSpec, **arguments: str) -> None:
    """Makes it a conversation whose template has these arguments."""
    spec.chat.messages.add(role="user").parts.add(text="Hi")
    spec.chat.template_arguments.update(arguments)


def refused(server: RunningServer, channel: grpc.Channel, change: Change) -> grpc.RpcError:
    request = stream_request("ROMEO:", 3, temperature=0)
    change(request.spec)
    with pytest.raises(grpc.RpcError) as unary:
        server.stub(channel).Generate(pb.GenerateRequest(spec=request.spec))
    with pytest.raises(grpc.RpcError) as streamed:
        list(server.stub(channel).StreamGenerate(request))
    assert unary.value.code() is streamed.value.code()
    assert unary.value.details() == streamed.value.details()
    return unary.value


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("sampling.temperature", lambda s: setattr(s.sampling, "temperature", 2.5)),
        ("sampling.temperature", lambda s: setattr(s.sampling, "temperature", float("nan"))),
        ("sampling.top_p", lambda s: setattr(s.sampling, "top_p", 0.0)),
        ("sampling.min_p", lambda s: setattr(s.sampling, "min_p", -0.1)),
        ("sampling.sequence_count", lambda s: setattr(s.sampling, "sequence_count", 0)),
        ("sampling.sequence_count", lambda s: setattr(s.sampling, "sequence_count", 9)),
        ("sampling.repetition_penalty", lambda s: setattr(s.sampling, "repetition_penalty", 0)),
        ("sampling.repetition_penalty", lambda s: setattr(s.sampling, "repetition_penalty", math.inf)),
        ("sampling.frequency_penalty", lambda s: setattr(s.sampling, "frequency_penalty", 2.1)),
        ("sampling.presence_penalty", lambda s: setattr(s.sampling, "presence_penalty", math.nan)),
        ("sampling.logit_bias[1]", lambda s: s.sampling.logit_bias.update({1: 101})),
        ("sampling.logit_bias[2147483648]", lambda s: s.sampling.logit_bias.update({2**31: 1})),
        ("sampling.logit_bias", lambda s: s.sampling.logit_bias.update(dict.fromkeys(range(1025), 1))),
        ("sampling.allowed_token_ids[1]", lambda s: s.sampling.allowed_token_ids.extend((1, 2**31))),
        ("sampling.bad_words[0]", lambda s: s.sampling.bad_words.append(" ")),
        ("sampling.bad_words", lambda s: s.sampling.bad_words.extend(["a"] * 129)),
        ("sampling.bad_words", lambda s: s.sampling.bad_words.append("ab" * 3000)),
        ("stopping.min_tokens", lambda s: setattr(s.stopping, "min_tokens", 2**31)),
        ("stopping.max_tokens", lambda s: setattr(s.stopping, "max_tokens", 0)),
        ("stopping.max_tokens", lambda s: setattr(s.stopping, "max_tokens", 1023)),
        ("stopping.stop", lambda s: s.stopping.stop.extend("abcde")),
        ("stopping.stop[0]", lambda s: s.stopping.stop.append("x" * 129)),
        ("stopping.stop[1]", lambda s: s.stopping.stop.extend(["a", ""])),
        ("stopping.stop_token_ids[0]", lambda s: s.stopping.stop_token_ids.append(2048)),
        ("stopping.stop_token_ids", lambda s: s.stopping.stop_token_ids.extend(range(65))),
        ("output.top_logprobs", lambda s: setattr(s.output, "top_logprobs", 21)),
        ("text", lambda s: setattr(s, "text", "")),
        ("text", lambda s: setattr(s, "text", "word " * 1500)),
        ("text", lambda s: setattr(s, "text", "w" * 70_000)),
        ("token_ids", lambda s: s.token_ids.ids.extend([1, 2048])),
        ("output_prefix", lambda s: s.output_prefix.ids.extend([1, 2048])),
        ("output_prefix", lambda s: s.output_prefix.ids.extend([1] * 1030)),
        ("prompt", lambda s: s.ClearField("text")),
        ("max_time", lambda s: s.max_time.FromSeconds(-1)),
        ("max_time", lambda s: setattr(s.max_time, "seconds", 2**62)),
        ("max_queue_time", lambda s: s.max_queue_time.FromSeconds(0)),
        ("cache_salt", lambda s: setattr(s, "cache_salt", "two words")),
        ("cache_salt", lambda s: setattr(s, "cache_salt", "x" * 65)),
        ("chat.messages", lambda s: s.chat.SetInParent()),
        ("chat.messages", lambda s: s.chat.messages.extend([pb.ChatMessage(role="user")] * 4097)),
        ("chat.messages", lambda s: s.chat.messages.add(role="user").parts.extend([pb.ContentPart(text="")] * 16_385)),
        ("chat.messages[1].role", lambda s: s.chat.messages.extend([pb.ChatMessage(role="user"), pb.ChatMessage()])),
        ("chat.messages[0].parts[0]", lambda s: s.chat.messages.add(role="user").parts.add()),
        ("chat", lambda s: s.chat.messages.add(role="user").parts.add(text="w" * 70_000)),
        ("images[0]", lambda s: s.images.add(data=b"x")),
        ("images", lambda s: (chat(s), s.images.add(data=b"x"))),
        (
            "chat.messages[0].parts[1].image",
            lambda s: s.chat.messages.add(role="user").parts.extend(
                [pb.ContentPart(text=""), pb.ContentPart(image=pb.Image(data=b"x"))]
            ),
        ),
        ("priority", lambda s: setattr(s, "priority", -101)),
        ("priority", lambda s: setattr(s, "priority", 101)),
        ("prompt_truncation.tokens", lambda s: setattr(s.prompt_truncation, "tokens", 0)),
        ("prompt_truncation", lambda s: (s.prompt_truncation.SetInParent(), s.images.add(data=b"x"))),
        (
            "chat.continue_final_message",
            lambda s: (
                chat(s),
                setattr(s.chat, "continue_final_message", True),
                setattr(s.chat, "add_generation_prompt", True),
            ),
        ),
        ("sampling.logits_processors_args[a]", lambda s: s.sampling.logits_processors_args.update(a="{}")),
        ("sampling.logits_processors_args[a]", lambda s: s.sampling.logits_processors_args.update(a="[]")),
        ("chat.template_arguments[a]", lambda s: chat(s, a="{")),
        ("chat.template_arguments[messages]", lambda s: chat(s, messages="[]")),
        ("chat.template_arguments[a b]", lambda s: chat(s, **{"a b": "1"})),
    ],
)
def test_bad_values_name_their_field(server: RunningServer, channel: grpc.Channel, field: str, change: Change) -> None:
    error = refused(server, channel, change)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = details(error)
    assert found["ErrorInfo"].reason == "INVALID_FIELD"
    assert [v.field for v in found["BadRequest"].field_violations] == [f"spec.{field}"]
    assert field in error.details()


def test_every_field_of_the_contract_is_read() -> None:
    """A field that is added to the proto must be converted: this list is what convert.py reads."""
    read = {
        "GenerationSpec": "model text token_ids chat images add_special_tokens output_prefix sampling stopping output "
        "max_time max_queue_time cache_salt priority prompt_truncation structured_output reasoning",
        "Reasoning": "max_tokens",
        "StructuredOutput": "json_schema json_object regex choice grammar structural_tag",
        "TextChoice": "texts",
        "PromptTruncation": "tokens keep_first",
        "Chat": "messages template_arguments add_generation_prompt continue_final_message tools tool_choice tool_name "
        "parallel_tool_calls",
        "Tool": "name description parameters strict",
        "ToolCall": "id name arguments",
        "ChatMessage": "role parts tool_calls tool_call_id name reasoning",
        "ContentPart": "text image",
        "SamplingParameters": "temperature top_p top_k min_p seed repetition_penalty frequency_penalty "
        "presence_penalty logit_bias allowed_token_ids bad_words logits_processors_args sequence_count beam_search",
        "BeamSearch": "width length_penalty",
        "StoppingCriteria": "max_tokens min_tokens stop stop_token_ids include_stop ignore_eos",
        "OutputOptions": "text token_ids logprobs top_logprobs prompt_logprobs skip_special_tokens prompt_token_ids "
        "raw_text",
    }
    for message, fields in read.items():
        assert {f.name for f in pb.DESCRIPTOR.message_types_by_name[message].fields} == set(fields.split())


def test_a_conversation_needs_a_chat_template(server: RunningServer, channel: grpc.Channel) -> None:
    error = refused(server, channel, chat)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the model has no chat template: send text or token_ids"
    found = details(error)
    assert found["ErrorInfo"].reason == "NO_CHAT_TEMPLATE"
    assert [v.field for v in found["BadRequest"].field_violations] == ["spec.chat"]


def test_neutral_values_of_later_features_are_let_through(server: RunningServer, channel: grpc.Channel) -> None:
    request = stream_request("ROMEO:", 3, temperature=0)
    request.spec.sampling.frequency_penalty = 0
    request.spec.sampling.repetition_penalty = 1
    request.spec.sampling.sequence_count = 1
    request.spec.stopping.min_tokens = 0
    answer = server.stub(channel).Generate(pb.GenerateRequest(spec=request.spec))
    assert answer.usage.completion_tokens == 3


def test_unknown_model_is_not_found(server: RunningServer, channel: grpc.Channel) -> None:
    error = refused(server, channel, lambda s: setattr(s, "model", "gpt-5"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    found = details(error)
    assert found["ResourceInfo"].resource_name == "gpt-5"
    assert found["ErrorInfo"].reason == "MODEL_NOT_FOUND"
    long = refused(server, channel, lambda s: setattr(s, "model", "m" * 20_000))
    assert details(long)["ErrorInfo"].reason == "MODEL_NOT_FOUND"


def test_unset_max_tokens_takes_what_context_and_pool_allow(server: RunningServer, channel: grpc.Channel) -> None:
    request = stream_request("ROMEO:", 1, temperature=0)
    request.spec.stopping.ClearField("max_tokens")
    answer = server.stub(channel).Generate(pb.GenerateRequest(spec=request.spec))
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 1024
    assert answer.sequences[0].finish_reason == pb.FINISH_REASON_LENGTH


def test_full_queue_says_when_to_come_back(server: RunningServer, channel: grpc.Channel) -> None:
    cancelled = "quire_requests_total{cancelled}"
    before = server.metrics()[cancelled]
    running = server.stub(channel).StreamGenerate(stream_request("KING:", 900, temperature=1))
    next(running)
    waiting = [server.stub(channel).StreamGenerate(stream_request("KING:", 5)) for _ in range(2)]
    server.wait_for_metric("quire_num_requests_waiting", 2)
    with pytest.raises(grpc.RpcError) as full:
        server.stub(channel).Generate(pb.GenerateRequest(spec=stream_request("KING:", 5).spec))
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = details(full.value)
    assert found["ErrorInfo"].reason == "QUEUE_FULL"
    assert found["RetryInfo"].retry_delay.ToMilliseconds() > 0
    waiting.pop().cancel()
    server.wait_for_metric("quire_num_requests_waiting", 1)
    late = stream_request("KING:", 5)
    late.spec.max_queue_time.FromMilliseconds(200)
    with pytest.raises(grpc.RpcError) as timeout:
        list(server.stub(channel).StreamGenerate(late))
    assert timeout.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(timeout.value)["ErrorInfo"].reason in ("QUEUE_TIMEOUT", "QUEUE_FULL")
    running.cancel()
    assert sum(m.deltas[0].token_count for m in waiting[0]) == 5
    server.wait_for_metric(cancelled, before + 2)  # the next tests compare counts


def test_request_id_is_echoed_and_unique_while_live(server: RunningServer, channel: grpc.Channel) -> None:
    request = stream_request("KING:", 1000, temperature=1)  # long enough to be there when the next one comes
    request.request_id = "mine-1"
    first = server.stub(channel).StreamGenerate(request)
    assert next(first).request_id == "mine-1"
    assert dict(first.initial_metadata())["x-request-id"] == "mine-1"
    with pytest.raises(grpc.RpcError) as twice:
        list(server.stub(channel).StreamGenerate(request))
    assert twice.value.code() is grpc.StatusCode.ALREADY_EXISTS
    first.cancel()
    server.wait_for_metric("quire_num_requests_running", 0)
    request.spec.stopping.max_tokens = 2
    assert sum(m.deltas[0].token_count for m in server.stub(channel).StreamGenerate(request)) == 2
    request.request_id = "two words"
    with pytest.raises(grpc.RpcError) as bad:
        list(server.stub(channel).StreamGenerate(request))
    assert details(bad.value)["BadRequest"].field_violations[0].field == "request_id"


def test_oversized_message_is_refused_by_the_transport(server: RunningServer, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub(channel).Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="x" * (5 * 2**20))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_outcomes_count_every_request(server: RunningServer, channel: grpc.Channel) -> None:
    before = server.metrics()
    refused(server, channel, lambda s: setattr(s.sampling, "top_p", 9.0))
    server.stub(channel).Generate(pb.GenerateRequest(spec=stream_request("A", 2).spec))
    after = server.metrics()
    grown = {k: after[k] - before[k] for k in after if k.startswith("quire_requests_total") and after[k] != before[k]}
    assert grown == {
        "quire_requests_total{invalid_field}": 2,
        "quire_requests_total{length}": 1,
    }
