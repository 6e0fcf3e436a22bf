"""Detokenizing as Llama 2's and Gemma's tokenizers do: spaces as "▁", unknown characters byte by byte."""

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from model.inputs.detokenizer import Detokenizer
from model.inputs.tokenizer import Tokenizer
from tests.support.examples import examples

SPECIAL = ("<unk>", "<s>", "</s>")
PIECES = ("▁", "a", "b", "é", "▁a", "▁b", "▁▁", "ab", "日", "🐈", "!", "\n")


def library(decoder: decoders.Decoder) -> Library:
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Library(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.decoder = decoder
    return made


def llama2() -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


def gemma() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


TOKENIZERS = {name: Tokenizer(library(made())) for name, made in (("llama 2", llama2), ("gemma", gemma))}
each = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
FIRST_BYTE, FIRST_PIECE = len(SPECIAL), len(SPECIAL) + 256


def as_bytes(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def sequences() -> st.SearchStrategy[list[int]]:
    characters = st.sampled_from(["é", "🐈", "日本"]).map(lambda text: as_bytes(text.encode()))
    raw = st.binary(max_size=5).map(as_bytes)
    special = st.integers(0, len(SPECIAL) - 1).map(lambda i: [i])
    piece = st.integers(FIRST_PIECE, FIRST_PIECE + len(PIECES) - 1).map(lambda i: [i])
    return st.lists(characters | raw | special | piece, max_size=10).map(
        lambda parts: [i for part in parts for i in part]
    )


def told(tokenizer: Tokenizer, ids: list[int], skip: bool, behind: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, behind)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@each
@pytest.mark.parametrize("skip", [False, True])
def test_parts_and_flush_are_the_whole_text(tokenizer: Tokenizer, skip: bool) -> None:
    @settings(max_examples=examples(500), deadline=None)
    @given(ids=sequences())
    @example(ids=[*as_bytes(b"\xc3\xa9"), 2, *as_bytes(b"\xff")])  # drawn too seldom: a special token within bytes
    @example(ids=as_bytes("é".encode()))
    def law(ids: list[int]) -> None:
        assert "".join(told(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)

    law()


@each
@pytest.mark.parametrize("skip", [False, True])
def test_output_goes_on_from_the_text_before(tokenizer: Tokenizer, skip: bool) -> None:
    """Wherever a text is cut behind a whole character, both parts make the whole."""

    @settings(max_examples=examples(500), deadline=None)
    @given(before=sequences(), ids=sequences())
    @example(before=[], ids=[FIRST_PIECE + PIECES.index("▁a")])
    def law(before: list[int], ids: list[int]) -> None:
        before.append(FIRST_PIECE + PIECES.index("b"))
        text = "".join(told(tokenizer, ids, skip, behind=True))
        assert text == tokenizer.decode_behind(ids, skip)
        assert tokenizer.decode(before, skip) + text == tokenizer.decode(before + ids, skip)

    law()


@each
def test_a_character_in_bytes_waits_for_what_comes_after_it(tokenizer: Tokenizer) -> None:
    a = FIRST_PIECE + PIECES.index("a")
    assert told(tokenizer, [a, *as_bytes("é".encode()), a, a], True) == ["a", "", "", "éa", "a", ""]
    assert told(tokenizer, [a, *as_bytes(b"\xc3\xa9\xff"), a], True) == ["a", "", "", "", "\ufffd" * 3 + "a", ""]


@each
def test_a_special_token_that_is_not_shown_parts_no_bytes(tokenizer: Tokenizer) -> None:
    ids = [*as_bytes(b"\xc3\xa9"), 2, *as_bytes(b"\xff")]
    assert "".join(told(tokenizer, ids, True)) == "\ufffd" * 3
    assert "".join(told(tokenizer, ids, False)) == "é</s>\ufffd"


@each
def test_spaces_at_the_beginning_are_those_of_the_whole(tokenizer: Tokenizer) -> None:
    ids = [FIRST_PIECE + PIECES.index(piece) for piece in ("▁", "▁a", "▁b")]
    assert "".join(told(tokenizer, ids, True)) == tokenizer.decode(ids, True)


@pytest.mark.parametrize(
    "forget",
    [lambda token, was_open, skip: False, lambda token, was_open, skip: FIRST_BYTE <= token < FIRST_PIECE],
    ids=["told at once", "a special token ends a run"],
)
def test_a_part_that_is_told_too_early_would_show(forget: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(library(llama2()))
    monkeypatch.setattr(tokenizer, "stays_open", forget)
    with pytest.raises(AssertionError):
        test_parts_and_flush_are_the_whole_text(tokenizer, True)
