"""Sampling parameters as vLLM's clients send them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.frontend.errors import RequestFailed
from rpc.services.inference.parameters import NEUTRAL, read_parameters
from rpc.services.inference.values import Values, read_json
from scheduler.invalid import InvalidRequest
from scheduler.parameters import Sampling, Stopping

ALL = {
    "n": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
    "frequency_penalty": -0.5, "presence_penalty": 2, "seed": 2**64 - 1, "stop": ["a", "b"], "stop_token_ids": [1, 2],
    "bad_words": ["c"], "max_tokens": 9, "min_tokens": 3, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 5,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "logit_bias": {"5": -1.5, "3": 100},
    "allowed_token_ids": [4, 3], "detokenize": False,
}  # fmt: skip
WORDS = st.sampled_from(["", "1", "-3", "0.5", "nan", "true", "[1]", "{}", "x"])
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS)
JSON = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(WORDS, PLAIN, max_size=3), st.just([[{}]]))


def test_every_parameter_is_read() -> None:
    made = read_parameters(ALL)
    assert made.sampling == Sampling(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=2**64 - 1, repetition_penalty=1.5,
        frequency_penalty=-0.5, presence_penalty=2.0, logit_bias=((3, 100.0), (5, -1.5)), allowed_token_ids=(4, 3),
        bad_words=("c",), sequence_count=2,
    )  # fmt: skip
    assert made.stopping == Stopping(9, 3, ("a", "b"), (1, 2), include_stop=True, ignore_eos=True)
    assert (made.logprobs, made.prompt_logprobs, made.top_logprobs) == (3, 5, 5)
    assert (made.text, made.skip_special_tokens) == (False, False)


def test_values_may_be_strings() -> None:
    as_strings = {name: json.dumps(value) if not isinstance(value, str) else value for name, value in ALL.items()}
    assert read_parameters(as_strings) == read_parameters(ALL)
    assert [read_parameters({"stop": text}).stopping.stop for text in ("[1]", "[", "[]")] == [("[1]",), ("[",), ("[]",)]
    assert read_parameters({"stop": "a", "ignore_eos": "True", "top_k": 7.0, "skip_special_tokens": 0}) == (
        read_parameters({"stop": ["a"], "ignore_eos": True, "top_k": 7, "skip_special_tokens": False})
    )


def test_what_is_not_said_is_vllm_s_default() -> None:
    made = read_parameters(dict.fromkeys(ALL))
    assert made == read_parameters({}) == read_parameters({"top_k": -1, "seed": -1})
    assert made.stopping == Stopping(max_tokens=16)
    assert made.sampling == Sampling(1.0, 1.0, 0, 0.0, repetition_penalty=1.0)
    assert (made.logprobs, made.prompt_logprobs, made.top_logprobs) == (None, None, 0)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("n", {"n": 1.5}),
        ("n", {"n": True}),
        ("n", {"n": "2 "}),
        ("n", {"n": "1" * 5000}),
        ("temperature", {"temperature": "warm"}),
        ("temperature", {"temperature": 10**400}),
        ("temperature", {"temperature": [1]}),
        ("sampling.temperature", {"temperature": "nan"}),
        ("sampling.temperature", {"temperature": 1e400}),
        ("sampling.top_k", {"top_k": -2}),
        ("sampling.seed", {"seed": 2**64}),
        ("stopping.max_tokens", {"max_tokens": 0}),
        ("stopping.min_tokens", {"min_tokens": 17}),
        ("stop", {"stop": [1]}),
        ("stop", {"stop": {}}),
        ("stopping.stop[1]", {"stop": ["a", ""]}),
        ("stop_token_ids[1]", {"stop_token_ids": [1, "x"]}),
        ("stop_token_ids", {"stop_token_ids": "[1"}),
        ("stop_token_ids", {"stop_token_ids": 5}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("logit_bias", {"logit_bias": [1]}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias[7]", {"logit_bias": {"7": "x"}}),
        ("sampling.logit_bias[7]", {"logit_bias": {"7": 101}}),
        ("ignore_eos", {"ignore_eos": "yes"}),
        ("ignore_eos", {"ignore_eos": 2}),
    ],
)
def test_bad_values_name_their_parameter(field: str, given: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_parameters(given)
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["use_beam_search", "guided_decoding", "lora_name", "tempratur", "x" * 10_000])
def test_parameters_that_there_are_not_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        read_parameters({"n": 1, name: {"a": 1}})
    failure = refused.value
    assert (failure.code, failure.reason, failure.field) == ("INVALID_ARGUMENT", "NOT_SUPPORTED", name[:64])
    assert name[:64] in failure.message


def test_what_changes_nothing_is_let_through() -> None:
    assert read_parameters(NEUTRAL | {"guided_decoding": None}) == read_parameters({})


@given(st.dictionaries(st.sampled_from([*ALL, *NEUTRAL, "x"]), JSON, max_size=4))
def test_no_json_raises_anything_else(given: dict[str, object]) -> None:
    try:
        made = read_parameters(given)
    except (InvalidRequest, RequestFailed):
        return
    assert type(made.sampling.temperature) is float
    assert type(made.sampling.sequence_count) is int
    assert type(made.top_logprobs) is int
    assert all(type(token) is int for token in made.stopping.stop_token_ids)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"NaN",
        b'{"a": Infinity}',
        b"1" * 5000,
        b" " * (2**18 + 1),
    ],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_parameters is"):
        read_json("sampling_parameters", data)


def test_nested_values_are_not_shown() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for read in (Values.integers, Values.texts, Values.pairs):
        with pytest.raises(InvalidRequest, match=r"a(\[0\])? is"):
            read(Values({"a": deep}), "a")
    with pytest.raises(InvalidRequest, match="a is 'a list'"):
        Values({"a": deep}).truth("a", False)
