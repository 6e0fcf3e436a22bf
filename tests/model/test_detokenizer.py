"""Law: the parts and the flush together are `decode` of all ids, and each part has whole characters only."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from model.inputs.detokenizer import Detokenizer
from model.inputs.tokenizer import Tokenizer
from tests.support.checkpoints import byte_tokenizer
from tests.support.examples import examples

HALF = "\ufffd"
DEMO = Path(__file__).parents[2] / "model" / "demo" / "checkpoint"


class Alphabet:
    """A byte-level tokenizer, and the bytes of each of its ids as `decode` sees them."""

    def __init__(self, library: Library, special: set[int]) -> None:
        self.library, self.tokenizer, self.special = library, Tokenizer(library), special
        byte_of = {character: byte for byte, character in _characters().items()}
        self.bytes = {
            i: piece.encode() if i in special else bytes(byte_of[c] for c in piece)
            for piece, i in library.get_vocab().items()
        }
        self.single = {data[0]: i for i, data in self.bytes.items() if len(data) == 1 and i not in special}

    def text(self, ids: list[int], skip: bool) -> str:
        """Returns the text of the ids, by Python's own decoder."""
        kept = [self.bytes[i] for i in ids if not (skip and i in self.special)]
        return b"".join(kept).decode("utf-8", "replace")


def _characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


ALPHABETS = {
    "small": Alphabet(byte_tokenizer(), {0}),
    "demo": Alphabet(Library.from_file(str(DEMO / "tokenizer.json")), {0}),
}
each = pytest.mark.parametrize("alphabet", ALPHABETS.values(), ids=ALPHABETS)


def sequences(alphabet: Alphabet) -> st.SearchStrategy[list[int]]:
    """Text, bytes that are no text, special tokens and any ids, in pieces."""
    known = sorted(alphabet.bytes)
    as_text = st.text(max_size=6).map(lambda text: alphabet.tokenizer.encode(text, add_special_tokens=False))
    emoji = st.sampled_from(["🐈", "👩‍🚀", "é", "e\u0301", "日本", "\ufffd", "\u200d", "🇩🇪", "\x00", " ", "  a"])
    byte_by_byte = emoji.map(lambda text: [alphabet.single[byte] for byte in text.encode()])
    raw = st.binary(max_size=12).map(lambda data: [alphabet.single[byte] for byte in data])
    cut = emoji.map(lambda text: [alphabet.single[byte] for byte in text.encode()[:-1]])
    special = st.just([0])
    anything = st.lists(st.sampled_from(known), max_size=4)
    pieces = st.lists(st.one_of(as_text, byte_by_byte, raw, cut, special, anything), max_size=8)
    return pieces.map(lambda parts: [i for part in parts for i in part])


def run(tokenizer: Tokenizer, ids: list[int], skip: bool) -> tuple[list[str], str]:
    """The parts and the flush."""
    detokenizer = Detokenizer(tokenizer, skip)
    return [detokenizer.push(i) for i in ids], detokenizer.flush()


@each
@pytest.mark.parametrize("skip", [False, True])
def test_parts_and_flush_are_the_whole_text(alphabet: Alphabet, skip: bool) -> None:
    @settings(max_examples=examples(300), deadline=None)
    @given(ids=sequences(alphabet))
    def law(ids: list[int]) -> None:
        parts, rest = run(alphabet.tokenizer, ids, skip)
        whole = alphabet.tokenizer.decode(ids, skip)
        assert "".join(parts) + rest == whole
        assert whole == alphabet.text(ids, skip)
        told = ""
        for n, part in enumerate(parts, 1):
            told += part
            now = alphabet.text(ids[:n], skip)
            if now.endswith(HALF):
                assert now[:-1].startswith(told), "what may become a character is held"
            else:
                assert told == now, "a text without an open end is told at once"

    law()


def check_character(alphabet: Alphabet, character: str, before: str = "") -> None:
    encoded = character.encode()
    start = alphabet.tokenizer.encode(before, add_special_tokens=False)
    parts, rest = run(alphabet.tokenizer, [*start, *(alphabet.single[byte] for byte in encoded)], True)
    assert parts[len(start) :] == [""] * (len(encoded) - 1) + [character]
    assert rest == ""


@each
@pytest.mark.parametrize("character", ["é", "日", "🐈", "\U0010ffff", "\u07ff", "\u0800", "\U00010000"])
def test_a_character_in_pieces_comes_out_whole(alphabet: Alphabet, character: str) -> None:
    check_character(alphabet, character)
    check_character(alphabet, character, before="so ")


@each
def test_a_character_cut_off_comes_out_at_the_flush(alphabet: Alphabet) -> None:
    ids = [alphabet.single[byte] for byte in b"ok\xf0\x9f"]
    assert run(alphabet.tokenizer, ids, True) == (["o", "k", "", ""], HALF)


@each
def test_bytes_that_never_become_a_character_are_told_once_that_is_sure(alphabet: Alphabet) -> None:
    ids = [alphabet.single[byte] for byte in b"a\xe2\x82b\xffc"]
    assert run(alphabet.tokenizer, ids, True) == (["a", "", "", HALF + "b", "", HALF + "c"], "")


@each
def test_a_replacement_character_that_the_model_wrote(alphabet: Alphabet) -> None:
    ids = [alphabet.single[byte] for byte in "a\ufffdb".encode()]
    parts, rest = run(alphabet.tokenizer, ids, True)
    assert "".join(parts) + rest == "a\ufffdb"


@each
def test_special_tokens(alphabet: Alphabet) -> None:
    a, b = alphabet.single[ord("a")], alphabet.single[ord("b")]
    special = alphabet.tokenizer.decode([0], False)
    assert run(alphabet.tokenizer, [0, a, 0, 0, b, 0], True) == (["", "a", "", "", "b", ""], "")
    assert run(alphabet.tokenizer, [a, 0, b], False) == (["a", special, "b"], "")


@each
def test_special_token_within_a_character(alphabet: Alphabet) -> None:
    """Skipped, it is as if it were not there; shown, it cuts the character in two."""
    first, second = (alphabet.single[byte] for byte in "é".encode())
    assert run(alphabet.tokenizer, [first, 0, second], True) == (["", "", "é"], "")
    special = alphabet.tokenizer.decode([0], False)
    assert run(alphabet.tokenizer, [first, 0, second], False) == (["", HALF + special, ""], HALF)


@each
def test_nothing_pushed(alphabet: Alphabet) -> None:
    assert Detokenizer(alphabet.tokenizer, True).flush() == ""


@each
def test_flush_tells_everything_once(alphabet: Alphabet) -> None:
    detokenizer = Detokenizer(alphabet.tokenizer, True)
    detokenizer.push(alphabet.single[0xF0])
    assert [detokenizer.flush(), detokenizer.flush()] == [HALF, ""]


class Counting(Tokenizer):
    """Counts the ids that it is given to decode."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


STREAMS: dict[str, Callable[[Alphabet], int]] = {
    "text": lambda alphabet: alphabet.single[ord("a")],
    "bytes that are no text": lambda alphabet: alphabet.single[0xFF],
    "continuation bytes": lambda alphabet: alphabet.single[0x80],
    "special tokens": lambda alphabet: 0,
}


@pytest.mark.parametrize("stream", STREAMS)
def test_work_for_a_token_does_not_grow_with_the_stream(stream: str) -> None:
    """A model that repeats one id to the end of its context must not make each token dearer than the one before."""
    alphabet = ALPHABETS["demo"]
    tokenizer = Counting(alphabet.library)
    detokenizer, work = Detokenizer(tokenizer, True), []
    for _ in range(3):
        before = tokenizer.decoded
        for _ in range(1000):
            detokenizer.push(STREAMS[stream](alphabet))
        work.append(tokenizer.decoded - before)
    assert work[2] <= 1.1 * work[1]
