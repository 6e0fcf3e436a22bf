"""Ends that depend on a constraint: stop strings beside it, and outputs that have taken all of their tokens."""

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders
from tokenizers.models import BPE

from model.inputs.grammar_checker import Constraint
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.completeness import Completeness, Question
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.output import Finish, FinishReason, OutputGap, StepTokens
from rpc.frontend.stream import RequestStream
from scheduler.events import End, EndReason, Submit
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.resolve import resolve
from scheduler.spec import Spec
from scheduler.structured import Structured
from tests.support.checkpoints import byte_tokenizer
from tests.support.examples import examples
from tests.support.frontends import PuppetEngine, make_frontend, outputs

LIMITS = Limits(320, 256, 4096, 8, structured_output=True)
TOKENIZER = Tokenizer(byte_tokenizer())
STOPPED, CLOSED, LENGTH = FinishReason.STOP, FinishReason.CLOSED, FinishReason.LENGTH


@dataclass(frozen=True)
class Ended:
    """A client's view of an end: text, count of tokens, reason, and the stop string."""

    text: str
    tokens: int
    reason: FinishReason
    stop: str | None = None


def by_characters(text: str, stops: Sequence[str], pattern: str, include: bool, least: int) -> Ended:
    """The rule in plain words: the first stop string whose text before it is complete ends the output."""
    for end in range(least + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop) and re.fullmatch(pattern, text[: end - len(stop)]):
                return Ended(text[: end if include else end - len(stop)], end, STOPPED, stop)
    return Ended(text, len(text), CLOSED if re.fullmatch(pattern, text) else LENGTH)


def stream_of(spec: Spec, is_complete: Callable[[Question], bool], tokenizer: Tokenizer = TOKENIZER) -> RequestStream:
    assert spec.structured is not None
    request = resolve(spec, [1, 2], LIMITS, ModelDefaults(eos_token_ids=(0,)), 0, grammar="G")

    def complete_ends(constraint: Constraint, text: str, ends: Sequence[int]) -> list[int]:
        return [end for end in ends if is_complete(Question(constraint, text[:end], of_stop=True))]

    structured = spec.structured
    completeness = Completeness(structured, structured, {}, (), None, tokenizer, is_complete, complete_ends)
    return RequestStream(spec, request, tokenizer, completeness=completeness)


def matches(question: Question) -> bool:
    return bool(re.fullmatch(question.constraint.text, question.text))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def accept(stream: RequestStream, text: str, start: int) -> bool:
    step = StepTokens.from_outputs(outputs([(0, start + i, token) for i, token in enumerate(ids(text))]))
    return sum(stream.accept(step, i) for i in range(len(step.tokens))) > 0


def ended(stream: RequestStream, taken: str) -> Ended:
    (sequence,) = stream.sequences
    assert sequence.finish is not None
    return Ended(taken, sequence.token_count, sequence.finish.reason, sequence.finish.stop_string)


cases = st.tuples(
    st.text("ab.", max_size=16),
    st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3, unique=True).map(tuple),
    st.sampled_from(["[ab.]*", "a+", "(ab)*", "[ab]+(\\.[ab]+)*", "", "a.*b", "b"]),
)


@settings(max_examples=examples(500), deadline=None)
@given(cases, st.lists(st.integers(0, 99), max_size=6), st.booleans(), st.integers(0, 4), st.integers(0, 3))
@example(("ab.ab", (".",), "(ab)*"), [], False, 0, 2)
@example(("aabb", ("ab", "b"), "a+"), [3], True, 0, 9)
@example(("aaaa", ("aa",), "aaa"), [1], False, 0, 0)
@example(("b.b", (".b", "b"), "b"), [2], False, 2, 1)
@example(("ab.ab", (".", ".ab"), "(ab)*"), [2, 4], False, 3, 1)
def test_a_stop_string_counts_behind_a_complete_text_alone(
    case: tuple[str, tuple[str, ...], str], places: list[int], include: bool, least: int, late: int
) -> None:
    """However the tokens come, and however many parts of them before each answer."""
    text, stops, pattern = case
    stopping = Stopping(stop=stops, include_stop=include, min_tokens=least)
    stream = stream_of(Spec("x", stopping=stopping, structured=Structured("regex", pattern or "()")), matches)
    (sequence,) = stream.sequences
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    taken, waited, stopped = "", 0, False
    for start, end in pairwise(edges):
        stopped = accept(stream, text[start:end], start) or stopped
        waited += 1
        if waited > late and sequence.question is not None:
            waited = 0
            stopped = sequence.answer(matches(sequence.question)) or stopped
        taken += "".join(delta.text for delta in stream.take())
        if stopped:
            break
    stream.end(End(0, EndReason.LENGTH))
    assert sequence.engine_ended
    stopped = sequence.settle() or stopped
    taken += "".join(delta.text for delta in stream.take())
    expected = by_characters(text, stops, pattern, include, least)
    assert ended(stream, taken) == expected
    assert stopped is (expected.reason is STOPPED)


@settings(max_examples=examples(200), deadline=None)
@given(cases, st.integers(0, 16))
@example(("ab.ab", (".",), "(ab)*"), 5)
@example(("a.b.a", (".",), "a\\.b"), 3)
def test_a_known_prefix_is_read_the_same_way(case: tuple[str, tuple[str, ...], str], count: int) -> None:
    text, stops, pattern = case
    known, rest = text[:count], text[count:]
    spec = Spec(
        "x", stopping=Stopping(stop=stops), structured=Structured("regex", pattern or "()"),
        output_prefix=tuple(ids(known)),
    )  # fmt: skip
    stream = stream_of(spec, matches)
    (sequence,) = stream.sequences
    expected, of_known = (by_characters(one, stops, pattern, False, 0) for one in (text, known))
    assert stream.ended is (of_known.reason is STOPPED)
    before = sequence.token_count
    if not stream.ended:
        accept(stream, rest, len(known))
        stream.end(End(0, EndReason.LENGTH))
        sequence.settle()
    (delta,) = stream.take()
    assert expected.text.endswith(delta.text)
    assert delta.first_position == before
    assert replace(ended(stream, ""), text=expected.text) == expected


TEXT = "ab.ab.b"
RULE = Structured("regex", "ab\\.ab")


def asked_at_the_first_stop() -> RequestStream:
    """Its b is held back when the question comes, as it may begin the other stop string."""
    stream = stream_of(Spec("x", stopping=Stopping(stop=(".", "bx")), structured=RULE), matches)
    accept(stream, TEXT, 0)
    return stream


def test_what_comes_while_a_question_is_open_is_neither_given_out_nor_counted() -> None:
    stream = asked_at_the_first_stop()
    (sequence,) = stream.sequences
    assert sequence.question == Question(RULE, "ab", of_stop=True)
    assert sequence.token_count == 3
    assert stream.emitted() == ((*ids("ab."),),), "a new attempt starts behind what was read"
    accept(stream, TEXT, 0)  # as from a new attempt: all of it is there
    with pytest.raises(OutputGap):
        accept(stream, "b", len(TEXT) + 1)
    stream.end(End(0, EndReason.LENGTH))
    assert not stream.ended
    assert stream.emitted() == (None,), "its engine has nothing more to do"
    assert not sequence.answer(False)
    assert sequence.question == Question(RULE, "ab.ab", of_stop=True)
    assert sequence.answer(True)
    assert ended(stream, "") == Ended("", 6, STOPPED, ".")


@pytest.mark.parametrize("reason", [FinishReason.DEADLINE, FinishReason.ABORTED])
def test_what_cuts_it_off_does_not_wait_for_an_answer(reason: FinishReason) -> None:
    stream = asked_at_the_first_stop()
    stream.close(Finish(reason))
    (delta,) = stream.take()
    assert (delta.text, len(delta.token_ids), delta.finish) == ("ab", 3, Finish(reason))


def test_a_stop_string_that_the_last_held_bytes_complete_does_not_hold_a_deadline_up() -> None:
    """The last two bytes are a character alone, and are held until the end, as another byte may follow."""
    library = Library(BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(library)
    spec = Spec("x", stopping=Stopping(stop=("né",)), structured=Structured.regex("un "))
    for reason, expected in ((FinishReason.DEADLINE, Ended("un ", 6, FinishReason.DEADLINE)), (LENGTH, None)):
        stream = stream_of(spec, matches, tokenizer)
        step = StepTokens.from_outputs(outputs([(0, i, token) for i, token in enumerate("un né".encode())]))
        for i in range(len(step.tokens)):
            stream.accept(step, i)
        assert stream.sequences[0].question is None, "the last character is still held"
        stream.close(Finish(reason))
        assert stream.ended is (expected is not None)
        if expected is None:
            assert stream.sequences[0].settle()
            expected = Ended("un ", 6, STOPPED, "né")
        assert ended(stream, stream.take()[0].text) == expected


def test_a_deadline_does_not_change_the_end_that_an_engine_has_reported() -> None:
    stream = stream_of(Spec("x", structured=RULE), matches)
    accept(stream, "ab", 0)
    stream.end(End(0, EndReason.LENGTH))
    assert stream.sequences[0].question == Question(RULE, "ab", of_stop=False)
    stream.close(Finish(FinishReason.DEADLINE))
    assert ended(stream, "ab") == Ended("ab", 2, LENGTH)


def test_half_a_character_at_the_end_is_not_asked_about() -> None:
    def fails(question: Question) -> bool:
        raise AssertionError(question)

    stream = stream_of(Spec("x", structured=Structured.regex(".*")), fails)
    step = StepTokens.from_outputs(outputs([(0, i, token) for i, token in enumerate(ids("aé")[:-1])]))
    for i in range(len(step.tokens)):
        stream.accept(step, i)
    stream.end(End(0, EndReason.LENGTH))
    assert ended(stream, "") == Ended("", 2, LENGTH)


def test_logprobs_and_the_total_are_those_of_the_tokens_that_count() -> None:
    output = Output(logprobs=True)
    spec = Spec("x", stopping=Stopping(stop=(".",)), structured=RULE, output=output)
    stream = stream_of(spec, matches)
    accept(stream, TEXT, 0)
    stream.sequences[0].settle()
    (delta,) = stream.take()
    assert [token for (token, _, _), *_ in delta.logprobs] == delta.token_ids == ids("ab.ab.")
    assert stream.sequences[0].total == -0.5 * 6


# In a frontend


def make(tokenizer: Tokenizer, **settings: float) -> tuple[Frontend, PuppetEngine]:
    frontend, engine, _ = make_frontend(tokenizer, **settings)
    engine.info = replace(engine.info, limits=LIMITS)
    frontend.detach()
    frontend.attach(engine)
    return frontend, engine


async def given_text(frontend: Frontend, engine: PuppetEngine, spec: Spec, text: str, ends: bool = True) -> Ended:
    """Has an engine write a text at once, and returns the end of the request."""
    async with frontend.open(spec, "a", None) as live:
        (attempt,) = engine.submitted()
        step = [(attempt, i, token) for i, token in enumerate(ids(text))]
        engine.deliver(outputs(step, [(attempt, EndReason.LENGTH)] if ends else (), [attempt]))
        async with asyncio.timeout(60):
            while not live.stream.ended:
                await live.wait()
        if live.stream.failure is not None:
            raise live.stream.failure
        return ended(live.stream, "".join(delta.text for delta in live.stream.take()))


CASES = {
    "JSON": (Structured.json_schema({"type": "object"}), (), '{"a": 1}', Ended('{"a": 1}', 8, CLOSED)),
    "JSON, cut off": (Structured.json_schema({"type": "object"}), (), '{"a": 1', Ended('{"a": 1', 7, LENGTH)),
    "stop in JSON": (Structured.json_object(), (",",), '{"a": 1, "b', Ended('{"a": 1, "b', 11, LENGTH)),
    "stop behind it": (Structured.regex("[a-z]+(, [a-z]+)*"), (", c",), "a, b, c", Ended("a, b", 7, STOPPED, ", c")),
    "choice": (Structured.choice(("yes", "yesterday")), (), "yes", Ended("yes", 3, CLOSED)),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_frontend_asks_the_process_that_knows_the_constraint(tokenizer: Tokenizer, name: str) -> None:
    structured, stops, text, expected = CASES[name]
    frontend, engine = make(tokenizer)
    try:
        spec = Spec("a", structured=structured, stopping=Stopping(max_tokens=40, stop=stops))
        assert await given_text(frontend, engine, spec, text) == expected
    finally:
        frontend.shutdown()


async def test_a_stop_string_ends_the_sequence_on_its_engine(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer)
    try:
        spec = Spec("a", structured=Structured.regex("[a-z.]+"), stopping=Stopping(max_tokens=40, stop=(".",)))
        assert await given_text(frontend, engine, spec, "a.b", ends=False) == Ended("a", 2, STOPPED, ".")
        assert engine.finished() == engine.submitted()
    finally:
        frontend.shutdown()


def cannot(question: Question) -> bool:
    raise RequestFailed("UNAVAILABLE", "GRAMMAR_UNCHECKED", f"no answer to {question.text}")


async def test_without_an_answer_a_stop_string_fails_and_an_end_is_none_in_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.frontend.outputs.Outputs._is_complete", lambda self, question: cannot(question))
    structured = Structured.regex("[a-z.]+")
    for stops, text in (((), "ab"), ((".",), "a.b")):
        frontend, engine = make(tokenizer)
        try:
            asked = Spec("a", structured=structured, stopping=Stopping(max_tokens=40, stop=stops))
            if stops:
                with pytest.raises(RequestFailed, match="no answer to a"):
                    await given_text(frontend, engine, asked, text, ends=False)
                assert engine.finished() == engine.submitted()
            else:
                assert await given_text(frontend, engine, asked, text) == Ended(text, 2, LENGTH)
        finally:
            frontend.shutdown()


@pytest.mark.parametrize("text", ["ab", "ab.ab.b"])
async def test_an_engine_that_fails_meanwhile_changes_no_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A sequence of which it has reported all does not move; another goes on behind the stop string on a new engine."""
    asked, answer = threading.Event(), threading.Event()

    def slow(question: Question) -> bool:
        asked.set()
        return answer.wait(60) and matches(question)

    monkeypatch.setattr("rpc.frontend.outputs.Outputs._is_complete", lambda self, question: slow(question))
    frontend, engine = make(tokenizer)
    try:
        ends = "." not in text
        structured = Structured.regex("ab" if ends else "ab\\.ab")
        spec = Spec("a", structured=structured, stopping=Stopping(max_tokens=40, stop=(".",)))
        async with frontend.open(spec, "a", None) as live:
            (attempt,) = engine.submitted()
            written = ids(text)
            step = [(attempt, i, token) for i, token in enumerate(written[:4])]
            engine.deliver(outputs(step, [(attempt, EndReason.LENGTH)] if ends else (), [attempt]))
            await asyncio.to_thread(asked.wait, 60)
            engine.deliver(outputs((), [(attempt, EndReason.ENGINE_FAILED)]))
            frontend.detach()
            frontend.attach(engine)  # as the one that takes its place
            moved = [event for event in engine.sent if isinstance(event, Submit)][1:]
            assert len(moved) == (0 if ends else 1)
            for event in moved:
                assert event.emitted == (tuple(ids("ab.")),)
                engine.deliver(outputs([(event.attempt, i, token) for i, token in enumerate(written) if i >= 3]))
            answer.set()
            async with asyncio.timeout(60):
                while not live.stream.ended:
                    await live.wait()
            made = ended(live.stream, "".join(delta.text for delta in live.stream.take()))
            assert made == (Ended("ab", 2, CLOSED) if ends else Ended("ab.ab", 6, STOPPED, "."))
    finally:
        answer.set()
        frontend.shutdown()


async def test_a_request_that_leaves_meanwhile_takes_its_question_with_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(question: Question) -> bool:
        asked.set()
        return answer.wait(60)

    monkeypatch.setattr("rpc.frontend.outputs.Outputs._is_complete", lambda self, question: slow(question))
    frontend, engine = make(tokenizer)
    try:
        spec = Spec("a", structured=Structured.regex("a*"), sampling=Sampling(sequence_count=1))
        async with frontend.open(spec, "a", None) as live:
            (attempt,) = engine.submitted()
            engine.deliver(outputs([(attempt, 0, ids("a")[0])], [(attempt, EndReason.LENGTH)], [attempt]))
            await asyncio.to_thread(asked.wait, 60)
            assert not live.stream.ended
        assert frontend.live_requests == 0
        assert not frontend.dispatch.delivery.open_questions
    finally:
        answer.set()
        frontend.shutdown()
