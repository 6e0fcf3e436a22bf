"""A request's output as its client sees it: what a sequence's tokens, ends and stop strings become."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.errors import RequestFailed
from rpc.frontend.output import Finish, FinishReason, StepTokens
from rpc.frontend.stream import RequestStream
from scheduler.events import End, EndReason, Logprobs, PromptPart
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Beam, Output, Sampling, Stopping
from scheduler.resolve import resolve
from scheduler.spec import Spec
from tests.support.frontends import outputs

LIMITS = Limits(vocabulary=320, context=256, pool_tokens=4096, sequences=8)


@pytest.fixture(scope="module")
def falling_back() -> Tokenizer:
    """Its tokens are single bytes, and neighbouring ones are read together."""
    library = Library(BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(library)


def stream_of(tokenizer: Tokenizer, spec: Spec) -> RequestStream:
    request = resolve(spec, [1, 2], LIMITS, ModelDefaults(eos_token_ids=(256,)), 0)
    return RequestStream(spec, request, tokenizer)


def accept(stream: RequestStream, tokens: Sequence[int]) -> None:
    start = stream.sequences[0].token_count
    step = StepTokens.from_outputs(outputs([(0, start + i, token) for i, token in enumerate(tokens)]))
    for i in range(len(tokens)):
        stream.accept(step, i)


@pytest.mark.parametrize("end", [End(0, EndReason.LENGTH), End(0, EndReason.STOP, stop_token_id=256)])
def test_a_stop_string_that_the_last_held_bytes_complete_ends_it(falling_back: Tokenizer, end: End) -> None:
    """Bytes that another byte could make no character are held until the end; they too are searched."""
    stream = stream_of(falling_back, Spec("x", stopping=Stopping(stop=("né",))))
    accept(stream, "un né".encode())
    assert not stream.ended, "the last character is still held"
    stream.end(end)
    (delta,) = stream.take()
    assert delta.text == "un "
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_string) == (FinishReason.STOP, "né")
    assert delta.finish.stop_token_id is None


def test_held_bytes_that_complete_no_stop_string_are_given_out(falling_back: Tokenizer) -> None:
    stream = stream_of(falling_back, Spec("x", stopping=Stopping(stop=("née",))))
    accept(stream, "un né".encode())
    stream.end(End(0, EndReason.LENGTH))
    (delta,) = stream.take()
    assert (delta.text, str(delta.finish)) == ("un né", "length")


GREEDY = Spec("x", sampling=Sampling(temperature=0))


def text_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("least", "ends"), [(3, False), (2, True)])
def test_a_stop_string_counts_after_min_tokens(tokenizer: Tokenizer, least: int, ends: bool) -> None:
    stream = stream_of(tokenizer, Spec("x", stopping=Stopping(stop=("c",), min_tokens=least)))
    accept(stream, text_of(tokenizer, "xbc"))
    assert stream.ended is ends


@pytest.mark.parametrize(("included", "text"), [(True, "ab<|end|>"), (False, "ab")])
def test_a_stop_token_is_shown_if_it_is_asked_for(tokenizer: Tokenizer, included: bool, text: str) -> None:
    stopping, output = Stopping(stop_token_ids=(0,), include_stop=included), Output(skip_special_tokens=False)
    stream = stream_of(tokenizer, Spec("x", stopping=stopping, output=output))
    accept(stream, [*text_of(tokenizer, "ab"), 0])
    stream.end(End(0, EndReason.STOP, stop_token_id=0))
    (delta,) = stream.take()
    assert delta.text == text
    assert delta.finish == Finish(FinishReason.STOP, stop_token_id=0)


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_without_text_no_text_is_given_and_stop_strings_hold(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    spec = Spec("x", stopping=Stopping(stop=stop), output=Output(text=False))
    stream = stream_of(tokenizer, spec)
    accept(stream, text_of(tokenizer, "abz"))
    stream.end(End(0, EndReason.LENGTH))
    assert [delta.text for delta in stream.take()] == [""]
    stopped = stream_of(tokenizer, spec)
    accept(stopped, text_of(tokenizer, "abzz"))
    assert stopped.ended is bool(stop)
    assert [delta.text for delta in stopped.take()] == [""]


def test_special_tokens_are_text_if_they_are_asked_for(tokenizer: Tokenizer) -> None:
    for skipped, text in ((True, "ab"), (False, "a<|end|>b")):
        stream = stream_of(tokenizer, Spec("x", output=Output(skip_special_tokens=skipped)))
        accept(stream, [*text_of(tokenizer, "a"), 0, *text_of(tokenizer, "b")])
        assert stream.take()[0].text == text


def test_a_prefix_that_has_a_stop_string_has_ended(tokenizer: Tokenizer) -> None:
    """Nothing behind the stop string counts, and the end is told though nothing new comes."""
    known = tuple(text_of(tokenizer, "abcd"))
    stream = stream_of(tokenizer, Spec("x", stopping=Stopping(stop=("c",)), output_prefix=known))
    assert stream.ended
    (delta,) = stream.take()
    assert (delta.text, delta.token_ids, delta.finish) == ("", [], Finish(FinishReason.STOP, stop_string="c"))
    assert (stream.token_count, stream.sequences[0].new_count) == (3, 0)


def test_what_was_known_is_not_new(tokenizer: Tokenizer) -> None:
    known = tuple(text_of(tokenizer, "ab"))
    stream = stream_of(tokenizer, Spec("x", output_prefix=known))
    assert stream.length == 2 + 2
    accept(stream, text_of(tokenizer, "cd"))
    (delta,) = stream.take()
    assert (delta.first_position, delta.text, len(delta.token_ids)) == (2, "cd", 2)
    assert (stream.token_count, stream.sequences[0].new_count, stream.length) == (4, 2, 6)


def test_tokens_after_the_end_are_dropped(tokenizer: Tokenizer) -> None:
    stream = stream_of(tokenizer, Spec("x", stopping=Stopping(stop=("b",))))
    accept(stream, text_of(tokenizer, "abcd"))
    assert stream.token_count == 2
    assert stream.sequences[0].total == -1.0, "two tokens of -0.5 each"
    (delta,) = stream.take()
    assert (delta.text, len(delta.token_ids)) == ("a", 2)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Output(), []),
        (Output(logprobs=True), [[(70, -0.5, 2)]]),
        (Output(top_logprobs=2), [[(70, -0.5, 2), (71, -0.25, 1)]]),
        (Output(top_logprobs=3), [[(70, -0.5, 2), (71, -0.25, 1), (72, -0.75, 3)]]),
    ],
)
def test_the_chosen_token_stands_first_and_once(
    tokenizer: Tokenizer, output: Output, expected: list[list[tuple[int, float, int]]]
) -> None:
    stream = stream_of(tokenizer, Spec("x", output=output))
    top = Logprobs(
        np.array([-0.5], np.float32), np.array([2], np.int32), np.array([[71, 70, 72]], np.int32),
        np.array([[-0.25, -0.5, -0.75]], np.float32),
    )  # fmt: skip
    stream.accept(StepTokens.from_outputs(replace(outputs([(0, 0, 70)]), logprobs=top)), 0)
    (delta,) = stream.take()
    assert [[(one.token_id, one.logprob, one.rank) for one in position] for position in delta.logprobs] == expected


def several(tokenizer: Tokenizer, sampling: Sampling) -> RequestStream:
    stream = stream_of(tokenizer, Spec("x", sampling=sampling))
    for index, count in ((0, 1), (1, 3)):
        step = replace(outputs([(0, i, 70) for i in range(count)]), indices=np.full(count, index, np.int32))
        for i in range(count):
            stream.accept(StepTokens.from_outputs(step), i)
    return stream


@pytest.mark.parametrize("reason", [EndReason.LENGTH, EndReason.STOP, EndReason.FINISHED])
def test_an_end_is_of_its_own_sequence(tokenizer: Tokenizer, reason: EndReason) -> None:
    stream = several(tokenizer, Sampling(sequence_count=2))
    assert stream.length == 2 + 1 + 3
    stream.end(End(0, reason, index=1, more=True))
    assert [sequence.finish is not None for sequence in stream.sequences] == [False, True]
    assert stream.emitted() == ((70,), None), "an engine that goes on computes what has not ended"
    assert not stream.ended


def test_a_search_begins_anew_and_ranks_by_its_length(tokenizer: Tokenizer) -> None:
    stream = several(tokenizer, Sampling(sequence_count=2, beam=Beam(2, length_penalty=2.0)))
    assert stream.emitted() == ()
    assert [sequence.score for sequence in stream.sequences] == pytest.approx([-0.5, -1.5 / 3**2])


def test_the_first_end_stands(tokenizer: Tokenizer) -> None:
    """A result stays one though the engine, or the server, fails afterwards; and a failure stays one."""
    failure = RequestFailed("UNAVAILABLE", "X", "x")
    done = stream_of(tokenizer, GREEDY)
    accept(done, [70])
    done.end(End(0, EndReason.LENGTH))
    done.end(End(0, EndReason.ENGINE_FAILED))
    done.fail(failure)
    done.close(Finish(FinishReason.DEADLINE))
    assert (done.failure, str(done.sequences[0].finish)) == (None, "length")
    failed = stream_of(tokenizer, GREEDY)
    failed.fail(failure)
    failed.end(End(0, EndReason.FAULT))
    failed.close(Finish(FinishReason.DEADLINE))
    accept(failed, [70])
    assert failed.failure is failure
    assert failed.take() == []


def test_logprobs_of_a_prompt_come_once_and_without_a_gap(tokenizer: Tokenizer) -> None:
    spec = Spec("x", output=Output(prompt_logprobs=True))
    request = resolve(spec, [5, 6, 7, 8], LIMITS, ModelDefaults(), 0)
    stream = RequestStream(spec, request, tokenizer)

    def part(start: int, count: int) -> PromptPart:
        return PromptPart(0, start, outputs([(0, i, 70) for i in range(count)]).logprobs)

    with pytest.raises(ValueError, match="prompt token 2 came where 1 was due"):
        stream.accept_prompt(part(2, 1))
    for start, count in ((1, 2), (1, 2), (2, 2)):  # an engine that took over tells some again
        stream.accept_prompt(part(start, count))
    assert [[one.token_id for one in position] for position in stream.prompt_logprobs] == [[], [6], [7], [8]]
