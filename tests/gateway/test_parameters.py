"""OpenAI's fields become those of quire.v1, whose names clients get in OpenAI's words."""

import json
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from quire.v1 import generation_service_pb2 as pb

from rpc.client.failures import Failure
from rpc.frontend.errors import RequestFailed
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.errors import of_call
from rpc.gateway.parameters import SAME, chat_spec, completion_spec, metadata_of, names_of
from rpc.services.convert import spec_from
from scheduler.prompts import Chat, ChatMessage, ImageHere, Truncation
from scheduler.spec import Spec

UINT32 = st.integers(0, 2**32 - 1)
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
PENALTY = st.floats(-2, 2, width=32)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": WORDS,
    "n": st.integers(1, 8),
    "temperature": st.floats(0, 2, width=32),
    "top_p": st.floats(0.5, 1, width=32),
    "min_p": st.floats(0, 1, width=32),
    "top_k": UINT32,
    "seed": st.integers(0, 2**64 - 1),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": st.floats(0.5, 2, width=32),
    "logit_bias": st.dictionaries(UINT32.map(str), st.floats(-100, 100, width=32), max_size=4),
    "logits_processors_args": st.dictionaries(
        WORDS,
        st.dictionaries(WORDS, st.integers() | WORDS | st.lists(st.booleans(), max_size=2), max_size=2),
        max_size=2,
    ),
    "allowed_token_ids": st.lists(UINT32, min_size=1, max_size=4),
    "bad_words": st.lists(WORDS.filter(str.strip), max_size=3),
    "max_tokens": st.integers(100, 200),
    "min_tokens": st.integers(0, 16),
    "stop": st.lists(WORDS, max_size=4),
    "stop_token_ids": st.lists(UINT32, max_size=4),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "cache_salt": st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
}
NAMED_OTHERWISE = {"n": "sequence_count", "include_stop_str_in_output": "include_stop"}
ASKED = st.fixed_dictionaries({}, optional=FIELDS)


def found(spec: Spec, name: str) -> Any:
    name = NAMED_OTHERWISE.get(name, name)
    homes = (spec, spec.sampling, spec.stopping, spec.output)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


@given(ASKED, st.booleans())
@settings(deadline=None)
def test_each_field_arrives_as_it_is(asked: dict[str, Any], chat: bool) -> None:
    """And what is not asked is the server's to decide."""
    if chat:
        made = chat_spec(ChatRequest.model_validate(asked | {"messages": [{"role": "user", "content": "A"}]}))
    else:
        request = CompletionRequest.model_validate(asked | {"prompt": "A"})
        made = completion_spec(request, request.prompt[0])
    spec = spec_from(made)
    for name, value in asked.items():
        expected = value
        if name == "logit_bias":
            expected = tuple(sorted((int(k), v) for k, v in value.items()))
        elif name == "logits_processors_args":
            expected = tuple(sorted((k, json.dumps(v)) for k, v in value.items()))
        assert found(spec, name) == (tuple(expected) if isinstance(expected, list) else expected), name
    unset = pb.SamplingParameters()
    for field in unset.DESCRIPTOR.fields:
        client_name = {"sequence_count": "n"}.get(field.name, field.name)
        if client_name not in asked:
            assert getattr(made.sampling, field.name) == getattr(unset, field.name)
            assert not field.has_presence or not made.sampling.HasField(field.name)
    assert spec.stopping.max_tokens == asked.get("max_tokens", None if chat else 16)


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_seed_of_64_bits_is_one(seed: int) -> None:
    request = CompletionRequest(prompt="A", seed=seed)
    assert spec_from(completion_spec(request, "A")).sampling.seed == seed % 2**64


def test_what_is_spelt_otherwise() -> None:
    message = {"role": "user", "content": [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}},
        {"type": "image_url", "image_url": {"url": "DATA:image/jpeg;base64,"}},
    ]}  # fmt: skip
    kwargs = {"enable_thinking": False, "mood": "ü", "list": [1, None]}
    asked = ChatRequest.model_validate({
        "messages": [{"role": "developer", "content": "b"}, message], "chat_template_kwargs": kwargs, "top_k": -1,
        "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 3, "n": 2, "use_beam_search": True,
        "length_penalty": 0.5, "stop": "x", "user": "me", "continue_final_message": True,
        "return_token_ids": True, "prompt_logprobs": 5,
    })  # fmt: skip
    made = chat_spec(asked)
    spec = spec_from(made)
    assert spec.prompt.messages == (ChatMessage("developer", "b"), ChatMessage("user", ("a", ImageHere(), ImageHere())))
    assert spec.images == (b"hello", b"")
    assert dict(spec.prompt.arguments) == {"enable_thinking": "false", "mood": '"\\u00fc"', "list": "[1, null]"}
    assert made.sampling.HasField("top_k")
    assert (spec.sampling.top_k, spec.stopping.max_tokens, spec.stopping.stop) == (0, 5, ("x",))
    assert (spec.output.logprobs, spec.output.top_logprobs, spec.output.prompt_logprobs) == (True, 5, True)
    assert (spec.output.token_ids, spec.output.prompt_token_ids, spec.truncation) == (True, True, None)
    assert (spec.prompt.continue_final_message, spec.prompt.add_generation_prompt) == (True, False)
    assert names_of(asked)["output.top_logprobs"] == "prompt_logprobs"
    assert (spec.sampling.beam.width, spec.sampling.beam.length_penalty, spec.sampling.sequence_count) == (2, 0.5, 2)


def test_how_a_conversation_goes_on() -> None:
    def chat(**more: Any) -> Chat:
        asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "A"}]} | more)
        prompt = spec_from(chat_spec(asked)).prompt
        assert isinstance(prompt, Chat)
        return prompt

    flags = [(None, None), (None, False), (True, None), (False, None), (False, True)]
    made = [chat(add_generation_prompt=add, continue_final_message=go_on) for add, go_on in flags]
    told = [(one.add_generation_prompt, one.continue_final_message) for one in made]
    assert told == [(True, False), (True, False), (True, False), (False, False), (False, True)]
    for more, expected in (
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": '"none"', "enable_thinking": "false", "thinking": "false"}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": '"low"', "enable_thinking": "true", "thinking": "true"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "x"}},
            {"reasoning_effort": '"low"', "enable_thinking": "false", "thinking": "true"},
        ),
    ):
        assert dict(chat(**more).arguments) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, None), ({"truncate_prompt_tokens": -1}, Truncation()), ({"truncation_side": "right"}, None),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, Truncation(3)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, Truncation(3, keep_first=True)),
    ],
)  # fmt: skip
def test_what_a_prompt_is_cut_to(asked: dict[str, Any], expected: Truncation | None) -> None:
    request = CompletionRequest.model_validate(asked | {"prompt": "A"})
    assert spec_from(completion_spec(request, "A")).truncation == expected


def test_prompts_and_echo() -> None:
    asked = CompletionRequest.model_validate({"prompt": ["a", [1, 2]], "echo": True, "logprobs": 0, "max_tokens": 0})
    text, ids = (spec_from(completion_spec(asked, prompt)) for prompt in asked.prompt)
    assert (text.prompt, ids.prompt) == ("a", (1, 2))
    assert (ids.output.prompt_logprobs, ids.output.logprobs, ids.output.top_logprobs) == (True, True, 0)
    assert (ids.output.prompt_token_ids, ids.output.token_ids) == (True, False)
    assert ids.stopping.max_tokens == 1
    assert CompletionRequest.model_validate({"prompt": [3, 4]}).prompt == [[3, 4]]
    plain = CompletionRequest.model_validate({"prompt": [[3]], "max_tokens": None})
    assert completion_spec(plain, plain.prompt[0]).output == pb.OutputOptions()
    assert completion_spec(plain, plain.prompt[0]).stopping.max_tokens == 16


BAD = [
    ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 9}, "frequency_penalty"), ({"presence_penalty": -9}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias[5]"),
    ({"bad_words": ["a", " "]}, "bad_words[1]"), ({"stop": ["a", ""]}, "stop[1]"), ({"priority": 101}, "priority"),
    ({"cache_salt": "ü"}, "cache_salt"), ({"min_tokens": 99, "max_tokens": 9}, "min_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"use_beam_search": True, "n": 0}, "n"), ({"use_beam_search": True, "length_penalty": 99}, "length_penalty"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "param"), BAD)
def test_what_the_server_refuses_has_the_clients_name(asked: dict[str, Any], param: str) -> None:
    request = CompletionRequest.model_validate(asked | {"prompt": "A"})
    with pytest.raises(RequestFailed) as refused:
        spec_from(completion_spec(request, "A"))
    code = grpc.StatusCode.INVALID_ARGUMENT
    failure = Failure(code, str(refused.value), "INVALID_FIELD", f"spec.{refused.value.field}")
    told = of_call(failure, names_of(request))
    assert (told.status, told.param, told.code) == (400, param, "invalid_field")
    assert told.message.startswith(param)
    assert not any(prefix in told.message for prefix in ("sampling.", "stopping.", "spec."))


def test_every_name_is_a_field_of_the_message() -> None:
    """A path that is misspelt would be found by no other test where the field is rare."""
    for path in SAME.values():
        message = pb.GenerationSpec()
        *parents, name = path.split(".")
        for parent in parents:
            message = getattr(message, parent)
        assert name in message.DESCRIPTOR.fields_by_name, path
    both = ChatRequest.model_fields | CompletionRequest.model_fields
    assert SAME.keys() <= both.keys()
    assert {f.name for f in pb.SamplingParameters.DESCRIPTOR.fields} == {
        path.split(".")[1] for path in names_of(CompletionRequest(prompt="A")) if path.startswith("sampling.")
    }


def test_limits_have_the_name_that_the_client_used() -> None:
    chat = {"messages": [{"role": "user", "content": "A"}]}
    for asked, tokens, top in (
        (ChatRequest.model_validate(chat | {"max_completion_tokens": 5}), "max_completion_tokens", "top_logprobs"),
        (ChatRequest.model_validate(chat | {"max_tokens": 5}), "max_tokens", "top_logprobs"),
        (CompletionRequest(prompt="A"), "max_tokens", "logprobs"),
    ):
        names = names_of(asked)
        assert (names["stopping.max_tokens"], names["output.top_logprobs"]) == (tokens, top)
    assert names_of(CompletionRequest(prompt=["A", "B"]), 1)["text"] == "prompt[1]"


def test_only_what_is_known_is_passed_on() -> None:
    headers = {"authorization": "Bearer x", "traceparent": "00-1", "cookie": "a", "x-request-id": "b", "host": "c"}
    assert metadata_of(headers) == (("authorization", "Bearer x"), ("traceparent", "00-1"))
