"""A request's output as its client sees it: what a sequence's tokens, ends and stop strings become."""

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.output import FinishReason, StepTokens
from rpc.frontend.stream import RequestStream
from scheduler.events import End, EndReason
from scheduler.limits import Limits, ModelDefaults
from scheduler.request import Spec, Stopping, resolve
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
    step = StepTokens.of(outputs([(0, start + i, token) for i, token in enumerate(tokens)]))
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
