"""The matcher of XGrammar does as that of llguidance, in every state and with every call."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inputs.grammars import ByteVocabulary
from model.inputs.matcher import Matcher
from scheduler.structured import Structured
from tests.model.test_jump_forward import PAIRS
from tests.support.grammar_backends import matcher
from tests.support.planted import plant

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

END = 0
SAME = [
    Structured.choice(["red", "green", "re", "name of it", "naïve"]),
    Structured.regex("(a|bc)*d[0-9]{2,3}"),
    Structured.regex("[a-z ]{0,12}: (yes|no)?"),
    Structured.grammar('root ::= "<" root ">" | "x"'),
    Structured.json_schema({"enum": ["red", "green", 1, None, True]}),
]
"""Constraints of which both allow the same texts."""


def pair(structured: Structured, size: int) -> tuple[Matcher, Matcher]:
    one, other = (matcher(backend, structured, PAIRS[size]) for backend in ("llguidance", "xgrammar"))
    return one, other


def state(made: Matcher) -> tuple[object, ...]:
    return made.is_accepting(), made.is_stopped(), made.is_error()


def allowed(made: Matcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("structured", SAME, ids=lambda one: one.text[:20])
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(PAIRS)), st.integers(0, 2**32))
def test_states_and_masks_are_the_same_along_any_output(structured: Structured, size: int, seed: int) -> None:
    rng, (one, other) = random.Random(seed), pair(structured, size)
    for _ in range(40):
        assert state(one) == state(other)
        assert allowed(one) == allowed(other)
        drawn = [rng.randrange(1, size) for _ in range(3)]
        for tokens in (drawn, [*allowed(one)[:1], *drawn]):
            if not one.is_stopped():
                assert one.validate_tokens(tokens) == other.validate_tokens(tokens)
        token = rng.choice(allowed(one))
        assert one.consume_token(token) == other.consume_token(token) is True
        if token == END:
            break
    assert state(one) == state(other)
    assert allowed(one) == allowed(other)


@pytest.mark.parametrize("tokens", [[1, 1], [0], []], ids=str)
def test_what_may_not_follow_fails_alike(tokens: list[int]) -> None:
    one, other = pair(SAME[0], 360)
    tried = one.deep_copy(), other.deep_copy()
    assert tried[0].try_consume_tokens(tokens) == tried[1].try_consume_tokens(tokens) == 0
    assert state(tried[0]) == state(tried[1]), "to try fails nothing"
    assert one.consume_tokens(tokens) == other.consume_tokens(tokens)
    assert state(one) == state(other)
    assert bool(other.get_error()) is bool(tokens)
    assert any(other.compute_bitmask()) is not bool(tokens)


@pytest.mark.parametrize("token", [-1, 1, 999, 2**40])
def test_ids_that_are_no_text_fail_without_a_word(token: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The library writes a warning for each of them, as for one behind the end."""
    ended = matcher("xgrammar", SAME[0], PAIRS[360])
    assert ended.consume_tokens([*PAIRS[360].tokenize_str("green"), END])
    for made in (matcher("xgrammar", SAME[0], PAIRS[360]), ended):
        assert not made.consume_token(token)
        assert made.is_error()
    assert capfd.readouterr() == ("", "")


def test_a_copy_changes_by_itself() -> None:
    made = matcher("xgrammar", Structured.regex("ab"), PAIRS[258])
    before, copied = allowed(made), made.deep_copy()
    assert copied.consume_tokens(PAIRS[258].tokenize_str("ab"))
    assert copied.is_stopped()
    assert copied.stop_reason() == "Complete"
    assert allowed(copied) == [END]
    assert not made.is_stopped()
    assert allowed(made) == before
    assert copied.consume_token(END)
    assert copied.consume_token(END), "as llguidance has it"
    assert not copied.consume_token(before[0])
    assert (copied.is_error(), copied.stop_reason(), made.is_error()) == (True, "Refused", False)


def test_a_mask_is_written_where_it_is_asked_for() -> None:
    """Into words that may be fewer or more than the vocabulary has, as logits may be narrower or wider."""
    made = matcher("xgrammar", Structured.regex("[a-c]"), PAIRS[258])
    whole = np.frombuffer(made.compute_bitmask(), np.int32)
    for words in (3, len(whole), len(whole) + 2):
        bits = np.full(words, 7, np.int32)
        made.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        assert bits[: len(whole)].tolist() == whole[:words].tolist()
        assert (bits[len(whole) :] == 7).all()


def test_special_tokens_are_no_text() -> None:
    vocabulary, made = PAIRS[258], matcher("xgrammar", Structured.regex("(.|\n)*"), PAIRS[258])
    special = [token for token in range(vocabulary.vocab_size) if vocabulary.is_special_token(token)]
    assert {0, 1} <= {*special}
    assert {*special} & {*allowed(made)} == {END}


def test_vocabularies_of_bytes_have_their_end() -> None:
    from llguidance import LLTokenizer

    bytes_alone = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
    made = matcher("xgrammar", Structured.choice(["a"]), bytes_alone)
    assert made.consume_tokens([ord("a"), ByteVocabulary.eos_token_id])


def test_harness_catches_a_mask_that_is_kept_for_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.inputs.with_xgrammar.matcher import XGrammarMatcher

    def stale(right: object) -> object:
        def take(self: XGrammarMatcher, token: int) -> bool:
            kept = self._bits
            taken = right(self, token)  # type: ignore[operator]
            self._bits = kept
            return taken

        return take

    plant(monkeypatch, XGrammarMatcher, "_take", stale)
    with pytest.raises(AssertionError):
        test_a_copy_changes_by_itself()
