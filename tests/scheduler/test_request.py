"""The one validator: every refusal names the field, the value and the limit; what is accepted can be served."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.block_hash import ImageSpan, Scope
from scheduler.bounds import check_text
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Beam, Output, Sampling, Stopping
from scheduler.prompts import Chat, ChatMessage, ImageHere
from scheduler.request import PromptImage, Request
from scheduler.resolve import resolve
from scheduler.settings import RequestLimits
from scheduler.spec import Spec

LIMITS = Limits(vocabulary=100, context=64, pool_tokens=256, sequences=8)
DEFAULTS = ModelDefaults(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, eos_token_ids=(2, 3))


def resolved(spec: Spec | None = None, prompt: tuple[int, ...] = (5, 6), limits: Limits = LIMITS) -> Request:
    """Resolves a spec whose prompt has these token ids."""
    return resolve(spec or Spec(prompt), list(prompt), limits, DEFAULTS, minted_seed=99)


def refusal(call) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        call()
    return refused.value


# Values that are wrong whatever the model

WRONG_VALUES = [
    *[(Sampling, "temperature", value, "must be in [0, 2]") for value in (-0.001, 2.001, math.nan, math.inf)],
    *[(Sampling, "top_p", value, "must be in (0, 1]") for value in (0.0, -1.0, 1.001, math.nan)],
    *[(Sampling, "top_k", value, "must be in [0, 2^32)") for value in (-1, 2**32, math.nan)],
    *[(Sampling, "min_p", value, "must be in [0, 1]") for value in (-0.001, 1.001, math.nan)],
    *[(Sampling, "seed", value, "must be in [0, 2^64)") for value in (-1, 2**64, math.nan)],
    *[(Stopping, "max_tokens", value, "must be at least 1") for value in (0, -1, math.nan)],
    *[(Spec, "max_time", value, "above 0") for value in (0.0, -1.0, math.nan, math.inf)],
    *[(Spec, "max_queue_time", value, "above 0") for value in (0.0, -1.0, math.nan, math.inf)],
]
PREFIX = {Sampling: "sampling.", Stopping: "stopping.", Spec: ""}


@pytest.mark.parametrize(("kind", "name", "value", "limit"), WRONG_VALUES)
def test_a_wrong_value_is_refused_by_name_value_and_limit(kind, name, value, limit):
    error = refusal(lambda: kind(**({"prompt": "x"} if kind is Spec else {}), **{name: value}))
    assert error.field == PREFIX[kind] + name
    assert str(error).startswith(f"{error.field} is {value!r}: ")
    assert limit in error.reason


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Sampling, {"temperature": 0.0}),
        (Sampling, {"temperature": 2.0}),
        (Sampling, {"top_p": 5e-324}),
        (Sampling, {"top_p": 1.0}),
        (Sampling, {"top_k": 0}),
        (Sampling, {"top_k": 2**32 - 1}),
        (Sampling, {"min_p": 0.0}),
        (Sampling, {"min_p": 1.0}),
        (Sampling, {"seed": 0}),
        (Sampling, {"seed": 2**64 - 1}),
        (Stopping, {"max_tokens": 1}),
    ],
)
def test_values_at_the_edge_are_accepted(kind, values):
    made = kind(**values)
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(
    ("pairs", "place", "limit"),
    [
        ((("a", "[1]"),), "[a]", "must be a JSON object"),
        ((("a", '{"x": NaN}'),), "[a]", "must be a JSON object"),
        ((("a", "{"),), "[a]", "must be a JSON object"),
        ((("a", '{"x": "\ud800"}'),), "[a]", "must be a JSON object"),
        ((("a", {}),), "[a]", "must be a JSON object"),
        ((("a", "{}"), ("a", "{}")), "", "has a processor twice"),
    ],
)
def test_arguments_of_logits_processors_are_json_objects(pairs, place, limit):
    error = refusal(lambda: Sampling(logits_processors_args=pairs))
    assert error.field == f"sampling.logits_processors_args{place}"
    assert limit in error.reason


def test_arguments_go_to_processors_that_the_engine_has():
    spec = Spec("x", sampling=Sampling(logits_processors_args=(("a", '{"x": 1}'), ("b", "{}"))))
    limits = replace(LIMITS, logits_processors=("b", "a"))
    request = resolve(spec, [5], limits, DEFAULTS, minted_seed=1)
    assert request.controls.logits_params.processors_args == (("a", '{"x": 1}'), ("b", "{}"))
    for known, has in ((("a", "c"), "has a, c"), ((), "has none")):
        other = replace(LIMITS, logits_processors=known)
        error = refusal(lambda: resolve(spec, [5], other, DEFAULTS, minted_seed=1))  # noqa: B023
        assert error.field == f"sampling.logits_processors_args[{'b' if known else 'a'}]"
        assert error.reason == f"is no logits processor of this server, which {has}"
    small = replace(limits, request=RequestLimits(logits_processors_args_bytes=9))
    error = refusal(lambda: resolve(spec, [5], small, DEFAULTS, minted_seed=1))
    assert str(error) == "sampling.logits_processors_args is '10 bytes': at most 9 bytes"


def test_an_empty_stop_string_is_refused_by_its_place():
    error = refusal(lambda: Stopping(stop=("a", "")))
    assert str(error) == "stopping.stop[1] is '': must not be empty"


def test_a_long_value_is_shown_in_part():
    error = InvalidRequest("text", "x" * 1000, "too long")
    assert str(error) == "text is '" + "x" * 56 + "...: too long"
    assert len(str(InvalidRequest("x" * 10**6, "y", "z" * 10**6))) < 1000
    assert len(InvalidRequest("text", "y", "z").of("x" * 10**6).field) == 200


@pytest.mark.parametrize("salt", ["", "a", "A-b_9", "x" * 64, "-", "_"])
def test_a_cache_salt_that_can_be_becomes_the_scope(salt):
    assert resolved(Spec("x", cache_salt=salt)).scope == Scope(salt=salt)


@pytest.mark.parametrize("salt", ["x" * 65, "a b", "a\n", "ä", "a/b", ".", "\0", " "])
def test_another_cache_salt_is_refused(salt):
    error = refusal(lambda: Spec("x", cache_salt=salt))
    assert error.field == "cache_salt"
    assert error.reason == "must be 1 to 64 of A-Z a-z 0-9 _ -"


# Values that this engine cannot serve


@pytest.mark.parametrize(
    ("spec", "field", "value", "limit"),
    [
        (Spec("x", stopping=Stopping(stop=("a",) * 5)), "stopping.stop", "5 strings", "at most 4"),
        (Spec("x", stopping=Stopping(stop=("a", "é" * 65))), "stopping.stop[1]", "130 bytes", "at most 128 bytes"),
        (Spec("x", stopping=Stopping(stop_token_ids=(1,) * 65)), "stopping.stop_token_ids", "65 ids", "at most 64"),
        (Spec("x", stopping=Stopping(stop_token_ids=(1, 100))), "stopping.stop_token_ids[1]", "100", "[0, 100)"),
        (Spec("x", stopping=Stopping(stop_token_ids=(-1,))), "stopping.stop_token_ids[0]", "-1", "[0, 100)"),
        (Spec("x", stopping=Stopping(stop_token_ids=(2**31,))), "stopping.stop_token_ids[0]", str(2**31), "[0, 100)"),
        (Spec("x", output=Output(top_logprobs=21)), "output.top_logprobs", "21", "[0, 20]"),
        (Spec("x", output=Output(top_logprobs=-1)), "output.top_logprobs", "-1", "[0, 20]"),
        (Spec("x", sampling=Sampling(sequence_count=0)), "sampling.sequence_count", "0", "[1, 8]"),
        (Spec("x", sampling=Sampling(sequence_count=9)), "sampling.sequence_count", "9", "[1, 8]"),
        (Spec("x", sampling=Sampling(sequence_count=2**31)), "sampling.sequence_count", str(2**31), "[1, 8]"),
        (Spec("x", sampling=Sampling(temperature=0.0, sequence_count=2)), "sampling.sequence_count", "2", "the same"),
        (
            Spec("x", sampling=Sampling(sequence_count=2), output_prefix=(5,)),
            "output_prefix",
            "1 tokens",
            "with one sequence alone",
        ),
    ],
)
def test_a_value_beyond_the_engines_limits_is_refused(spec, field, value, limit):
    error = refusal(lambda: resolved(spec))
    assert error.field == field
    assert value in str(error)
    assert limit in error.reason


def test_limits_themselves_are_accepted():
    stopping = Stopping(stop=("é" * 64,) * 4, stop_token_ids=tuple(range(64)))
    request = resolved(Spec("x", stopping=stopping, output=Output(top_logprobs=20)))
    assert request.controls.top_logprobs == 20


def test_limits_are_the_engines_not_fixed():
    limits = replace(LIMITS, request=RequestLimits(stop_strings=1, stop_token_ids=1, top_logprobs=1))
    error = refusal(lambda: resolved(Spec("x", stopping=Stopping(stop=("a", "b"))), limits=limits))
    assert (error.field, error.reason) == ("stopping.stop", "at most 1")


def test_a_stop_string_that_is_not_unicode_is_refused_like_any_other_value():
    """Arguments of a command line that are not UTF-8 reach Python as lone surrogates."""
    error = refusal(lambda: resolved(Spec("x", stopping=Stopping(stop=("a", "\udcff")))))
    assert error.field == "stopping.stop[1]"


# The prompt


@pytest.mark.parametrize(("prompt", "field"), [("", "text"), ((), "token_ids")])
def test_an_empty_prompt_is_refused(prompt, field):
    error = refusal(lambda: resolved(Spec(prompt), prompt=()))
    assert (error.field, error.reason) == (field, "the prompt has no tokens")


@pytest.mark.parametrize("token", [-1, 100, 2**31, 2**40, -(2**40)])
def test_a_token_outside_the_vocabulary_is_refused(token):
    error = refusal(lambda: resolved(prompt=(5, token, 6)))
    assert str(error) == f"token_ids is {token}: token ids must be in [0, 100)"


def test_the_first_and_last_token_of_the_vocabulary_are_accepted():
    assert resolved(prompt=(0, 99)).prompt.tolist() == [0, 99]


@pytest.mark.parametrize(
    ("context", "pool", "longest"), [(64, 256, 64), (256, 64, 65), (64, 64, 64), (64, 63, 64), (64, 62, 63)]
)
def test_a_prompt_that_leaves_no_room_for_output_is_refused_with_the_numbers(context, pool, longest):
    limits = replace(LIMITS, context=context, pool_tokens=pool)
    assert limits.longest == longest
    assert resolved(prompt=(1,) * (longest - 1), limits=limits).max_tokens == 1
    for length in (longest, longest + 1):
        error = refusal(lambda length=length: resolved(prompt=(1,) * length, limits=limits))
        assert error.field == "token_ids"
        assert f"{length} tokens" in str(error)
        for number in (longest, context, pool):
            assert str(number) in error.reason


limits_and_prompts = st.builds(
    lambda context, pool, fill: (
        replace(LIMITS, context=context, pool_tokens=pool),
        1 + int(fill * (min(context, pool + 1) - 2)),
    ),
    st.integers(2, 300),
    st.integers(1, 300),
    st.floats(0, 1),
)


@given(limits_and_prompts)
def test_without_max_tokens_a_request_may_use_what_context_and_pool_allow(drawn):
    limits, length = drawn
    request = resolved(prompt=(1,) * length, limits=limits)
    assert request.max_tokens >= 1
    assert length + request.max_tokens <= limits.context
    assert length + request.max_tokens - 1 <= limits.pool_tokens
    assert length + request.max_tokens + 1 > limits.context or length + request.max_tokens > limits.pool_tokens


@given(limits_and_prompts, st.integers(1, 400))
def test_max_tokens_is_kept_or_refused_with_the_numbers(drawn, asked):
    limits, length = drawn
    prompt = (1,) * length
    spec = Spec(prompt, stopping=Stopping(max_tokens=asked))
    if length + asked <= limits.context and length + asked - 1 <= limits.pool_tokens:
        assert resolved(spec, prompt, limits).max_tokens == asked
        return
    error = refusal(lambda: resolved(spec, prompt, limits))
    assert error.field == "stopping.max_tokens"
    assert str(error).startswith(f"stopping.max_tokens is {asked}: at most {limits.longest - length} fit")
    for number in (length, limits.context, limits.pool_tokens):
        assert str(number) in error.reason


# The request that is made of it

maybe_floats = st.none() | st.floats(0.0, 1.0, exclude_min=True)


@given(
    sampling=st.builds(
        Sampling,
        temperature=st.none() | st.just(0.0) | st.floats(0.0, 2.0),
        top_p=maybe_floats,
        top_k=st.none() | st.integers(0, 2**32 - 1),
        min_p=maybe_floats | st.just(0.0),
        seed=st.none() | st.integers(0, 2**64 - 1),
    )
)
def test_defaults_fill_in_only_where_the_request_is_silent(sampling):
    controls = resolved(Spec("x", sampling=sampling)).controls
    for name in ("temperature", "top_p", "top_k", "min_p"):
        asked = getattr(sampling, name)
        assert getattr(controls, name) == (getattr(DEFAULTS, name) if asked is None else asked)
    assert controls.seed == (99 if sampling.seed is None else sampling.seed)


@pytest.mark.parametrize(("logprobs", "top", "expected"), [(False, 0, -1), (True, 0, 0), (True, 3, 3), (False, 3, 3)])
def test_alternatives_imply_logprobs(logprobs, top, expected):
    output = Output(logprobs=logprobs, top_logprobs=top)
    assert resolved(Spec("x", output=output)).controls.top_logprobs == expected


@pytest.mark.parametrize(
    ("stopping", "expected"),
    [
        (Stopping(), (2, 3)),
        (Stopping(ignore_eos=True), ()),
        (Stopping(stop_token_ids=(7, 3, 7)), (2, 3, 7)),
        (Stopping(stop_token_ids=(3, 7), ignore_eos=True), (3, 7)),
    ],
)
def test_end_tokens_and_stop_tokens_end_a_request_each_named_once(stopping, expected):
    assert resolved(Spec("x", stopping=stopping)).stop_ids == expected


@pytest.mark.parametrize("queue_timeout", [None, 2.5])
def test_patience_is_the_requests_own(queue_timeout):
    assert resolved(Spec("x", max_queue_time=queue_timeout)).queue_timeout == queue_timeout


def test_the_prompt_is_an_int32_array():
    prompt = resolved(prompt=(5, 6)).prompt
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [5, 6]


@pytest.mark.parametrize(("context", "most"), [(64, 2**16), (100_000, 16 * 100_000)])
def test_text_is_bounded_before_it_is_tokenized(context, most):
    limits = replace(LIMITS, context=context, pool_tokens=context)
    check_text("x" * most, limits)
    check_text("é" * (most // 2), limits)
    for text in ("x" * (most + 1), "é" * (most // 2 + 1)):
        error = refusal(lambda text=text: check_text(text, limits))
        assert error.field == "text"
        assert f"{len(text.encode())} bytes" in str(error)
        assert f"{most} bytes" in error.reason
        assert str(context) in error.reason


def test_text_that_is_not_unicode_is_refused():
    assert refusal(lambda: check_text("a\udcff", LIMITS)).field == "text"


def test_there_are_no_more_alternatives_than_tokens():
    limits = replace(LIMITS, vocabulary=10)
    resolved(Spec("x", output=Output(top_logprobs=10)), limits=limits)
    error = refusal(lambda: resolved(Spec("x", output=Output(top_logprobs=11)), limits=limits))
    assert (error.field, error.reason) == ("output.top_logprobs", "must be in [0, 10]")


# Output that was there before


@pytest.mark.parametrize("prefix", [(-1,), (3, 100), (0,) * 60])
def test_an_output_prefix_is_checked_like_the_prompt(prefix):
    error = refusal(lambda: resolved(Spec("x", output_prefix=prefix), prompt=(1, 2, 3, 4, 5)))
    assert error.field == "output_prefix"


def test_an_output_prefix_takes_nothing_from_what_the_output_may_be():
    request = resolved(Spec("x", output_prefix=(7,) * 59), prompt=(1, 2, 3, 4, 5))
    assert request.max_tokens == 59


# Ends that have to wait for min_tokens


def test_no_end_token_is_drawn_before_min_tokens():
    adjustments = resolved(Spec("x", stopping=Stopping(min_tokens=4, stop_token_ids=(7, 9)))).controls.logits_params
    assert (adjustments.not_yet, adjustments.min_tokens) == ((2, 3, 7, 9), 4)
    without = resolved(Spec("x", stopping=Stopping(min_tokens=4, ignore_eos=True))).controls.logits_params
    assert (without.not_yet, without.min_tokens) == ((), 0)
    assert resolved(Spec("x")).controls.logits_params.not_yet == ()


def test_min_tokens_that_do_not_fit_are_refused_with_the_numbers():
    error = refusal(lambda: resolved(Spec("x", stopping=Stopping(min_tokens=63)), prompt=(5, 6)))
    assert (error.field, error.reason) == ("stopping.min_tokens", "at most 62 fit after 2 prompt tokens")
    assert resolved(Spec("x", stopping=Stopping(min_tokens=62)), prompt=(5, 6)).max_tokens == 62


# A beam search

BEAM = Sampling(beam=Beam(4))
NOT_WITH_A_SEARCH = [
    *[
        (f"sampling.{name}", Spec("x", sampling=replace(BEAM, **{name: value})))
        for name, value in {
            "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 0, "repetition_penalty": 1.5,
            "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": ((5, 1.0),), "allowed_token_ids": (5,),
            "bad_words": ("a",),
        }.items()
    ],
    *[
        (f"stopping.{name}", Spec("x", sampling=BEAM, stopping=Stopping(**{name: value})))
        for name, value in {"stop": ("a",), "min_tokens": 1}.items()
    ],
    ("output_prefix", Spec("x", sampling=BEAM, output_prefix=(5,))),
]  # fmt: skip


@pytest.mark.parametrize(("field", "spec"), NOT_WITH_A_SEARCH)
def test_what_a_search_would_ignore_is_refused(field, spec):
    error = refusal(lambda: resolved(spec))
    assert (error.field, error.reason) == (field, "does not go with sampling.beam_search")


def test_a_search_goes_by_the_logprobs_of_the_model_alone():
    defaults = replace(DEFAULTS, repetition_penalty=1.3)
    request = resolve(Spec("x", sampling=BEAM), [5], LIMITS, defaults, minted_seed=1)
    assert request.controls.logits_params.repetition == 1.0
    assert request.controls.temperature == 0.0
    plain = resolve(Spec("x"), [5], LIMITS, defaults, minted_seed=1)
    assert plain.controls.logits_params.repetition == 1.3


@pytest.mark.parametrize(("top", "drawn"), [(0, 8), (3, 8), (8, 8), (20, 20)])
def test_a_search_draws_among_twice_its_width_and_no_fewer_than_are_shown(top, drawn):
    request = resolved(Spec("x", sampling=BEAM, output=Output(top_logprobs=top)))
    assert request.drawing.top_logprobs == drawn
    assert request.controls.top_logprobs == (top or -1), "its client sees as many as it asked for"


@pytest.mark.parametrize(
    ("sampling", "changes", "field", "limit"),
    [
        (Sampling(beam=Beam(17)), {}, "sampling.beam_search.width", "[1, 16]"),
        (Sampling(beam=Beam(9)), {}, "sampling.beam_search.width", "[1, 8]"),
        (Sampling(beam=Beam(5)), {"vocabulary": 9}, "sampling.beam_search.width", "[1, 4]"),
        (Sampling(beam=Beam(2), sequence_count=3), {}, "sampling.beam_search.width", "sequence_count, which is 3"),
        (Sampling(sequence_count=4), {"sequences": 3}, "sampling.sequence_count", "[1, 3]"),
    ],
)
def test_rows_and_width_are_bounded_by_what_the_engine_has(sampling, changes, field, limit):
    sequences = 99 if limit == "[1, 16]" else 8
    limits = replace(LIMITS, **{"sequences": sequences, **changes})
    error = refusal(lambda: resolve(Spec("x", sampling=sampling), [5], limits, ModelDefaults(), minted_seed=1))
    assert error.field == field
    assert limit in error.reason


# Parts that go with a request to the engine


def test_priority_is_bounded_by_the_server_and_kept():
    limits = replace(LIMITS, request=RequestLimits(least_priority=-3))
    assert resolved(Spec("x", priority=-3), limits=limits).priority == -3
    error = refusal(lambda: resolved(Spec("x", priority=-4), limits=limits))
    assert (error.field, error.reason) == ("priority", "must be at least -3 on this server")


def test_each_penalty_is_its_own():
    adjustments = resolved(
        Spec("x", sampling=Sampling(frequency_penalty=0.5, presence_penalty=-0.25))
    ).controls.logits_params
    assert (adjustments.frequency, adjustments.presence) == (0.5, -0.25)


def test_bad_words_without_tokens_ban_nothing():
    adjustments = resolve(
        Spec("x"), [5], LIMITS, DEFAULTS, minted_seed=1, bad_words=[[7], [], [8, 9], [7]]
    ).controls.logits_params
    assert adjustments.banned == ((7,), (8, 9))


@pytest.mark.parametrize(("prefix_lm", "whole"), [(True, 3), (False, 0)])
def test_a_prompt_that_is_read_in_both_directions_is_shared_whole(prefix_lm, whole):
    request = resolve(Spec("x"), [5, 6, 7], LIMITS, DEFAULTS, minted_seed=1, prefix_lm=prefix_lm)
    assert request.scope.bidirectional == whole


def test_an_image_spans_its_first_placeholder_to_its_last():
    image = PromptImage(np.zeros((1, 3, 2, 2), np.uint8), b"digest", np.array([3, 4, 6], np.int32), (1, 3))
    assert image.span == ImageSpan(3, 7, b"digest")


@pytest.mark.parametrize("count", [0, 2])
def test_a_conversation_has_as_many_images_as_places_for_them(count):
    messages = (ChatMessage("user", ("a", ImageHere())),)
    error = refusal(lambda: Spec(Chat(messages), images=(b"x",) * count))
    assert (error.field, error.reason) == ("images", "the messages of the conversation have 1")
