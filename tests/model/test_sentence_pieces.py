"""Laws: ids are those of the sentencepiece library, with added tokens those of transformers; so is the text of any ids;
parts of a text together are the whole.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.convert_slow_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils import sentencepiece_model_pb2_new

import model.inputs.added_tokens as added_tokens
import model.inputs.sentence_pieces as sentence_pieces
from model.errors import CheckpointError
from model.inputs.detokenizer import Detokenizer
from model.inputs.sentence_pieces import SentencePieceTokenizer
from model.inputs.tokenizer import Tokenizer
from model.inputs.tokenizer_files import load_tokenizer
from tests.support.examples import examples
from tests.support.planted import plant
from tests.support.sentence_pieces import SETTINGS, library, load, trained, write

pytestmark = pytest.mark.sample(3)

NAMES = ("<s>", "</s>", "<unk>", "<pad>", "<eos>", "<bos>", "<mask>", "[INST]", "[/INST]", "<x>", "<start_of_turn>")
ADDED = {"<pad>": 700, "<|im|>": 701, "ab": 702, "<|im|>x": 703}
ATOMS = (
    *("First", "Citizen:", "you", " the", "hear me", "ab", "a", ".", "12", "'s"),
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\x00", "\x07", "\x7f", "▁", "▁▁", "\u00a0", "\u3000", "\u200b"),
    *(
        "é",
        "e\u0301",
        "日本",
        "🐈",
        "👩‍🚀",
        "🇩🇪",
        "ﬁ",
        "\uff11",
        "½",
        "İ",
        "\u017f\u0307\u0323",
        "क्षि",
        "\u1100\u1161\u11a8",
        "\ufffd",
    ),
    *("<0x41>", "<|", "<", "s>", "\U0010ffff"),
)
each = pytest.mark.parametrize("name", SETTINGS)
many = settings(max_examples=examples(250), deadline=None)


def texts(*more: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from((*ATOMS, *more)) | st.text(max_size=4), max_size=9).map("".join)


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, often bytes, spaces, or those that only some models have."""
    processor = library(name)
    pieces = processor.get_piece_size()
    whole = st.sampled_from(ATOMS).map(processor.encode_as_ids)
    raw = st.binary(max_size=5).map(lambda data: [processor.piece_to_id(f"<0x{byte:02X}>") for byte in data])
    spaces = st.sampled_from(["▁", "▁▁", "▁the", "a"]).map(lambda piece: [processor.piece_to_id(piece)])
    anything = st.integers(0, pieces + 3).map(lambda i: [i])
    return st.lists(whole | raw | spaces | anything, max_size=8).map(lambda parts: [i for part in parts for i in part])


# The laws, as functions that planted faults can break.


def check_raw_text(tokenizer: Tokenizer, name: str) -> None:
    @many
    @given(text=texts())
    def law(text: str) -> None:
        assume(not any(token in text for token in NAMES))
        assert tokenizer.encode(text, False) == library(name).encode_as_ids(text)

    law()


def check_decoding(tokenizer: Tokenizer, name: str) -> None:
    processor = library(name)

    @many
    @given(ids=ids_of(name))
    def law(ids: list[int]) -> None:
        known = [i for i in ids if i < processor.get_piece_size()]
        plain = [i for i in known if not processor.is_control(i) and not processor.is_unknown(i)]
        assert tokenizer.decode(plain, True) == tokenizer.decode_all(plain, False) == processor.decode_ids(plain)
        assert tokenizer.decode(ids, True) == processor.decode_ids(plain), "what stands apart is not shown"

    law()


def check_parts(tokenizer: Tokenizer, name: str, skip: bool) -> None:
    @many
    @given(ids=ids_of(name))
    def law(ids: list[int]) -> None:
        detokenizer = Detokenizer(tokenizer, skip)
        parts = [*(detokenizer.push(i) for i in ids), detokenizer.flush()]
        assert "".join(parts) == tokenizer.decode(ids, skip)

    law()


def check_parts_behind_text(tokenizer: Tokenizer, name: str) -> None:
    before = library(name).encode_as_ids("hear me")

    @many
    @given(ids=ids_of(name))
    def law(ids: list[int]) -> None:
        detokenizer = Detokenizer(tokenizer, True, behind=True)
        parts = [*(detokenizer.push(i) for i in ids), detokenizer.flush()]
        assert tokenizer.decode(before, True) + "".join(parts) == tokenizer.decode(before + ids, True)

    law()


def check_transformers(directory: Path, pattern: str = "") -> None:
    """But where text after the beginning, or after an added token, starts with a space and would get one in front:
    transformers leaves one of the two out, the sentencepiece library does not.
    """
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    cutter = added_tokens.Cutter(theirs.added_tokens_decoder)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    prefix = config["tokenizer_class"] == "LlamaTokenizer" and config.get("add_prefix_space") is not False

    @many
    @given(text=texts(*NAMES, *ADDED))
    def law(text: str) -> None:
        cut = list(cutter.cut(text))
        if prefix:
            exposed = cut if config.get("legacy") else cut[:1]
            assume(not any(isinstance(part, str) and part.startswith((" ", "▁")) for part in exposed))
        assert ours.encode(text, True) == theirs.encode(text)
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
        ids = ours.encode(text, True)
        if all(isinstance(part, int) or "�" not in part for part in cut):
            assert ours.decode(ids, False) == theirs.decode(ids)
            assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)

    law()


@pytest.fixture
def _transformers_reads_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that sentencepiece brings for it can need a newer protobuf than the one installed."""
    monkeypatch.setattr(
        transformers.convert_slow_tokenizer, "import_protobuf", lambda message="": sentencepiece_model_pb2_new
    )


@each
def test_ids_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    check_raw_text(load_tokenizer(write(tmp_path / "m", name)), name)


@each
def test_text_is_that_of_the_library(name: str, tmp_path: Path) -> None:
    check_decoding(load(tmp_path / "m", name), name)


@each
@pytest.mark.parametrize("skip", [False, True])
def test_parts_and_flush_are_the_whole_text(name: str, skip: bool, tmp_path: Path) -> None:
    check_parts(load(tmp_path / "m", name, {"added_tokens.json": {"<|im|>": 702}}), name, skip)


@each
def test_output_goes_on_from_the_text_before(name: str, tmp_path: Path) -> None:
    check_parts_behind_text(load(tmp_path / "m", name), name)


LISTED = {
    "added_tokens_decoder": {
        "0": {"content": "<unk>", "special": True},
        "1": {"content": "<s>", "special": True, "normalized": False},
        "2": {"content": "</s>", "special": True},
        "700": {"content": "<pad>", "special": False, "normalized": False, "rstrip": True},
        "701": {"content": "<|im|>", "special": False, "normalized": True, "lstrip": True},
        "702": {"content": "ab", "special": True, "single_word": True},
    },
    "pad_token": "<pad>",
}
MAP = {"bos_token": {"content": "<s>", "normalized": True}, "pad_token": "<pad>", "eos_token": "</s>"}
DIRECTORIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama 2": ("llama", {}, {"add_bos_token": True, "add_eos_token": False, "legacy": False}),
    "mistral 1": ("llama", {}, {"add_bos_token": True, "legacy": True, "add_eos_token": True}),
    "with control pieces": ("mistral 3", {}, {"add_bos_token": True, "bos_token": "<s>", "legacy": None}),
    "no space in front": ("llama", {}, {"add_prefix_space": False, "add_eos_token": True}),
    "with added tokens": ("llama", {"added_tokens.json": ADDED}, {"add_bos_token": True}),
    "with a map": ("llama", {"added_tokens.json": ADDED, "special_tokens_map.json": MAP}, {"add_bos_token": True}),
    "that lists them": ("llama", {"special_tokens_map.json": {"bos_token": "no"}}, LISTED | {"add_bos_token": True}),
    "that names more": ("llama", {}, {"pad_token": "[P]", "cls_token": "[C]", "im_token": "<|im|>"}),
    "with no beginning": ("llama", {}, {"bos_token": None, "add_bos_token": True}),
    "gemma": ("gemma", {}, {"add_bos_token": True, "mask_token": "<mask>"}),
    "gemma with nothing around": ("gemma", {}, {"mask_token": "<mask>"}),
}


@pytest.mark.usefixtures("_transformers_reads_pieces")
@pytest.mark.parametrize("case", DIRECTORIES)
def test_ids_and_text_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, files, config = DIRECTORIES[case]
    check_transformers(write(tmp_path / "m", name, files, **config))


def test_beginning_and_end_are_put_around_only_where_the_directory_says_so(tmp_path: Path) -> None:
    both = load(tmp_path / "m", "llama", add_bos_token=True, add_eos_token=True)
    assert both.encode("", True) == [1, 2]
    assert both.encode("", False) == load(tmp_path / "m", "llama").encode("", True) == []
    named = load(tmp_path / "m", "llama", bos_token={"content": "</s>"}, add_bos_token=True)
    assert named.encode("", True) == [2]
    assert load(tmp_path / "m", "t5", add_bos_token=True).encode("", True) == [], "the model has none"


def test_spaces_in_a_text_are_those_of_the_library_not_of_transformers(tmp_path: Path) -> None:
    tokenizer, processor = load(tmp_path / "m", "llama"), library("llama")
    assert processor.id_to_piece(tokenizer.encode(" a", False)) == ["▁", "▁a"]
    assert processor.id_to_piece(tokenizer.encode("<s> a", False)) == ["<s>", "▁a"]
    assert processor.id_to_piece(tokenizer.encode("<s>a", False)) == ["<s>", "a"]
    assert processor.id_to_piece(load(tmp_path / "m", "llama", legacy=True).encode("<s>a", False)) == ["<s>", "▁a"]


def test_a_token_has_the_id_that_its_file_gives_it(tmp_path: Path) -> None:
    more = {"added_tokens.json": {"<pad>": 709, "<|im|>": 701}, "special_tokens_map.json": {"sep_token": "[SEP]"}}
    tokenizer = load(tmp_path / "m", "llama", more)
    assert tokenizer.encode("<|im|><pad>[SEP]", False) == [701, 709, 710]
    assert tokenizer.decode([701, 709, 710, 704], False) == "<|im|><pad>[SEP]", "704 is no token"
    assert tokenizer.decode([701, 709, 710, 704], True) == "<|im|><pad>"
    texts = [tokenizer.text_of(i) for i in (1, 701, 710, 704, 10**6, -1)]
    assert texts == ["<s>", "<|im|>", "[SEP]", None, None, None]


def test_a_piece_that_a_file_gives_another_name(tmp_path: Path) -> None:
    listed = {"3": {"content": "<tool>", "special": True}}
    tokenizer = load(tmp_path / "m", "mistral 3", added_tokens_decoder=listed)
    assert tokenizer.encode("<tool>", False) == [3]
    assert tokenizer.decode([3], False) == "<tool>"
    assert 3 not in tokenizer.encode("[INST]", False)


def test_spaces_after_a_token_that_is_shown_stay(tmp_path: Path) -> None:
    for name in ("llama", "t5"):
        tokenizer, processor = load(tmp_path / "m", name), library(name)
        ids = [processor.piece_to_id(piece) for piece in ("▁the", "</s>", "▁the")]
        assert tokenizer.decode(ids, False) == "the</s> the"
        assert tokenizer.decode(ids, True) == "the the"


def test_tokenizer_json_wins(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "llama")
    assert isinstance(load_tokenizer(directory), SentencePieceTokenizer)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(directory)


def test_the_library_is_imported_only_for_a_model_that_needs_it() -> None:
    """The program asserts it, in a process of its own."""
    program = (
        "import sys; from model.inputs.tokenizer_files import load_tokenizer; from rpc.paths import demo_directory\n"
        "load_tokenizer(demo_directory()); assert 'sentencepiece' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "cannot be read as a SentencePiece model"),
    "cut short": (lambda data: data[:-9], "cannot be read as a SentencePiece model"),
    "of tiktoken": (lambda data: b"aGVsbG8= 0\nd29ybGQ= 1\n", "cannot be read as a SentencePiece model"),
    "a piece is no text": (lambda data: data.replace(b"</s>", b"<\xff\xff>"), "cannot be read as a SentencePiece"),
    "a pointer of git-lfs": (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "cannot be read"),
    "huge": (lambda data: bytes(2**26 + 1), "has more than 67108864 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_model_is_named(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    directory = write(tmp_path / "m", "llama")
    (directory / "tokenizer.model").write_bytes(change(trained("llama")))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_tokenizer(directory)
    assert str(directory / "tokenizer.model") in str(raised.value)


def test_a_damaged_file_is_refused_or_still_a_model(tmp_path: Path) -> None:
    directory, data, refused = write(tmp_path / "m", "llama"), trained("llama"), 0
    chance = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.choice([chance.randrange(len(data)), -chance.randint(1, 600)])] = chance.randrange(256)
        (directory / "tokenizer.model").write_bytes(damaged)
        try:
            tokenizer = load_tokenizer(directory)
        except CheckpointError as error:
            refused += "tokenizer.model" in str(error)
        else:
            tokenizer.decode(tokenizer.encode("First 日本 🐈 e\u0301", True) + list(range(700)), False)
    assert 100 < refused < 300


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        ({}, {"tokenizer_class": "XLMRobertaTokenizer"}, "'XLMRobertaTokenizer', which is not supported without"),
        ({}, {"bos_token": {"content": 1}}, "is no token"),
        ({}, {"add_bos_token": "yes"}, "must be of type bool"),
        ({}, {"extra_special_tokens": [3]}, "is no token"),
        ({}, {"added_tokens_decoder": {"x": {"content": "y"}}}, "must have ids as keys"),
        ({}, {"added_tokens_decoder": {"5": {"content": "<s>"}}}, "has id 5 there, but id 1 in tokenizer.model"),
        ({"added_tokens.json": {"<pad>": "3"}}, {}, "must be an id"),
        ({"added_tokens.json": {"<pad>": -3}}, {}, "must be an id"),
        ({"added_tokens.json": {"": 703}}, {}, "is no token"),
        ({"special_tokens_map.json": []}, {}, "special_tokens_map.json"),
    ],
)
def test_files_that_say_nonsense(files: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m", "llama", files, **config)


# Planted faults.


def change_the_model(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]) -> None:
    """The library is given other bytes than those of tokenizer.model."""
    plant(monkeypatch, sentence_pieces, "_processor", lambda made: lambda data: made(change(data)))


def no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    change_the_model(monkeypatch, lambda data: data + b"\x1a\x02\x18\x00")


def no_byte_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def ordinary(data: bytes) -> bytes:
        """All pieces that are bytes are of the normal type, and the trainer's byte_fallback is off."""
        return data.replace(b"\x18\x06", b"\x18\x01") + b"\x12\x03\x98\x02\x00"

    change_the_model(monkeypatch, ordinary)


def another_normalizer(monkeypatch: pytest.MonkeyPatch) -> None:
    change_the_model(monkeypatch, lambda data: data + b"\x1a\x02\x20\x01")


def no_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: SentencePieceTokenizer, ids: list[int], first: bool) -> str:
        return str(self._start.decode_ids(ids))

    plant(monkeypatch, SentencePieceTokenizer, "_run", lambda _: run)


def special_tokens_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, added_tokens, "_special", lambda read: lambda config: reversed(list(read(config))))


def prefix_after_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, sentence_pieces, "_prefix", lambda _: lambda add: b"")


def end_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(around: Callable[..., list[int]]) -> Callable[..., list[int]]:
        return lambda *a: around(*a) if a[1] == "bos_token" else []

    plant(monkeypatch, sentence_pieces, "_around", stand_in)


def every_text_is_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentencePieceTokenizer, "anchor", [])


def nothing_is_special(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, sentence_pieces, "_own_tokens", lambda _: lambda processor: {})


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Path], None]]] = {
    "no space in front": (no_prefix, lambda path: test_ids_are_those_of_the_library("llama", path)),
    "no bytes": (no_byte_fallback, lambda path: test_ids_are_those_of_the_library("llama", path)),
    "spaces removed": (another_normalizer, lambda path: test_ids_are_those_of_the_library("llama", path)),
    "spaces lost within a text": (no_anchor, test_spaces_after_a_token_that_is_shown_stay),
    "spaces lost behind a prompt": (
        every_text_is_a_beginning,
        lambda path: test_output_goes_on_from_the_text_before("llama", path),
    ),
    "order of tokens": (
        special_tokens_backwards,
        lambda path: test_ids_and_text_are_those_of_transformers("that names more", path),
    ),
    "a space after every token": (
        prefix_after_every_token,
        lambda path: test_ids_and_text_are_those_of_transformers("llama 2", path),
    ),
    "end forgotten": (end_forgotten, lambda path: test_ids_and_text_are_those_of_transformers("mistral 1", path)),
    "control pieces as text": (
        nothing_is_special,
        lambda path: test_ids_and_text_are_those_of_transformers("with control pieces", path),
    ),
}


@pytest.mark.usefixtures("_transformers_reads_pieces")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_show(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, law = FAULTS[fault]
    monkeypatch.setattr(f"{__name__}.many", settings(max_examples=250, deadline=None))  # a fault shows in a few of them
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        law(tmp_path)


def test_spaces_that_are_told_alone_would_get_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def give(self: Detokenizer, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted, self._emitted_text = len(self._window), self._decode(self._window)
        return new

    plant(monkeypatch, Detokenizer, "_give", lambda _: give)
    monkeypatch.setattr(f"{__name__}.many", settings(max_examples=2000, deadline=None))  # it shows in one of 30
    with pytest.raises(AssertionError):
        check_parts(load(tmp_path / "m", "t5"), "t5", True)
