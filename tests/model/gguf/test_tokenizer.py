"""A tokenizer from a GGUF file's metadata gives the ids, and the text, of the tokenizer that the file was made from."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model.errors import CheckpointError
from model.gguf.cutting import CUTTINGS
from model.inputs.chat import find_chat_template
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.trial import try_tokenizer
from rpc.paths import demo_directory
from tests.support.examples import examples
from tests.support.sentence_pieces import library, trained

HARD = (
    "First Citizen:\nYou're  12345 don't, it'S\t \n\n é e\u0301 日本語 🐈 x=1;  ",
    " leading", "trailing ", "", " ", "  \n ", "<|end|>the<|end|> cat<|user|>", "½ \uff11\uff12 ﬁ İ\u0130",
    "a\u00a0b\u3000c",
    "[INST] hi [/INST]", "1234567890 3.14", "I'VE we'll THEY'D", "\x00\x07\ufffd", "#$%^&*()\r\n\r\n",
)  # fmt: skip
ATOMS = (
    "the",
    " cat",
    "s",
    "'s",
    "'LL",
    "12",
    "3",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "e\u0301",
    "日本",
    "🐈",
    "<|end|>",
    ".",
    "\u00a0",
)
many = settings(max_examples=examples(150), deadline=None)
texts = st.lists(st.sampled_from(ATOMS) | st.text(max_size=4), max_size=9).map("".join)


def lines() -> list[str]:
    return (demo_directory().parent / "tinyshakespeare.txt").read_text().splitlines()[:800]


def write(path: Path, fill: Callable[[GGUFWriter], None]) -> Path:
    writer = GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hub_tokenizer(pre: pre_tokenizers.PreTokenizer, nfc: bool, whole: bool) -> Tokenizer:
    """Byte-level BPE as the model families' tokenizer.json have it.

    Its merges are those of texts that were not cut, so that a cut in another place shows in the ids.
    """
    made = Tokenizer(models.BPE(ignore_merges=whole))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    numbers = [f"x{i}='{i % 7}' I'VE\n\n {i * 37 % 1000}(\t{i % 100})!!`." for i in range(300)]
    made.train_from_iterator([*lines(), *HARD * 5, *numbers], trainer)
    made.pre_tokenizer = pre
    made.decoder = decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    made.add_tokens([AddedToken("<|user|>", special=False, normalized=False)])
    return made


def cut(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
HUB: dict[str, tuple[pre_tokenizers.PreTokenizer, bool, bool]] = {
    "gpt-2": (BYTES, False, False),
    "llama-bpe": (cut(ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + END), False, True),
    "qwen2": (cut(ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + END), True, False),
    "qwen35": (
        cut(
            ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        True,
        False,
    ),
    "kimi-k2": (
        cut(
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        False,
        True,
    ),
    "deepseek-v3": (
        cut(
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001 - as the hub writes it
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        False,
        False,
    ),
    "seed-coder": (
        cut(ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
        False,
        False,
    ),
    "bloom": (cut(" ?[^(\\s|.,!?…。，、।۔،)]+"), False, False),  # noqa: RUF001 - as the hub writes it
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]), False, False),
}
"""Pre-tokenizer, NFC and ignore_merges as the hub has them, by the name in a file."""


def write_bpe(path: Path, made: Tokenizer, pre: str | None, more: Callable[[GGUFWriter], None] | None = None) -> Path:
    said: dict[str, Any] = json.loads(made.to_str())
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {one["content"]: one["special"] for one in said["added_tokens"]}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds[special.get(token)] for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in said["model"]["merges"]])
        writer.add_bos_token_id(vocabulary["<|end|>"])
        if more is not None:
            more(writer)

    return write(path, fill)


@pytest.fixture(scope="module", params=HUB)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer, int]:
    """Ours, the hub's, and the ids that only ours puts in front."""
    made = hub_tokenizer(*HUB[request.param])
    path = write_bpe(tmp_path_factory.mktemp("bpe") / "model.gguf", made, request.param)
    return load_tokenizer(path), made, int(CUTTINGS[request.param].begins)


def check(pair: tuple[Any, Tokenizer, int], text: str) -> None:
    ours, theirs, begins = pair
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, False) == ids
    assert ours.encode(text, True) == [theirs.token_to_id("<|end|>")] * begins + ids
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", HARD)
def test_byte_level_ids_are_those_of_the_hub(pair: tuple[Any, Tokenizer, int], text: str) -> None:
    check(pair, text)


@many
@given(text=texts)
def test_byte_level_ids_of_any_text(pair: tuple[Any, Tokenizer, int], text: str) -> None:
    check(pair, text)


def test_ways_to_cut_differ(tmp_path: Path) -> None:
    """Another name in the file gives other ids: the tests above are not content with any."""
    made, ids = hub_tokenizer(*HUB["gpt-2"]), {}
    for name in ("default", "gpt-2", "llama-bpe", "qwen2", "smollm", "tekken", "gpt-4o", "falcon"):
        ours = load_tokenizer(write_bpe(tmp_path / f"{name}.gguf", made, name))
        ids[tuple(ours.encode("".join(HARD) + "x12345678='1' I'VE\n\n (\t12)!! caféHello 12!!`.", False))] = name
    assert len(ids) == 8, ids.values()


@pytest.mark.parametrize("name", CUTTINGS)
@pytest.mark.sample(3)
def test_each_way_to_cut_is_served(name: str, tmp_path: Path) -> None:
    made = hub_tokenizer(*HUB["gpt-2"])
    path = write_bpe(tmp_path / "model.gguf", made, name)
    ours = load_tokenizer(path)
    for text in HARD:
        if "\u0130" not in text and "e\u0301" not in text:  # NFC
            assert ours.decode(ours.encode(text, False), False) == text


def test_the_trial_passes_real_tokenizers(tmp_path: Path) -> None:
    for name in ("llama-bpe", "default", "tekken"):
        try_tokenizer(write_bpe(tmp_path / f"{name}.gguf", hub_tokenizer(*HUB["gpt-2"]), name))
    try_tokenizer(write_pieces(tmp_path / "pieces.gguf", "llama"))


def write_pieces(path: Path, name: str, more: Callable[[GGUFWriter], None] | None = None) -> Path:
    """As convert_hf_to_gguf.py writes a tokenizer.model."""
    model: SentencePieceProcessor = library(name)
    assert trained(name)
    tokens, scores, kinds = [], [], []
    own = {"<start_of_turn>", "<end_of_turn>", "<mask>", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "\t"}
    for i in range(model.get_piece_size()):
        tokens.append(model.id_to_piece(i))
        scores.append(model.get_score(i))
        kind = TokenType.USER_DEFINED if tokens[-1] in own and name != "llama" else TokenType.NORMAL
        kind = TokenType.UNKNOWN if model.is_unknown(i) else TokenType.CONTROL if model.is_control(i) else kind
        kinds.append(TokenType.BYTE if model.is_byte(i) else kind)

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(model.bos_id())
        writer.add_eos_token_id(model.eos_id())
        writer.add_unk_token_id(model.unk_id())
        writer.add_add_space_prefix(not name.startswith("gemma"))
        if more is not None:
            more(writer)

    return write(path, fill)


@pytest.fixture(scope="module", params=["llama", "gemma"])
def pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, SentencePieceProcessor]:
    path = write_pieces(tmp_path_factory.mktemp("pieces") / "model.gguf", request.param)
    return load_tokenizer(path), library(request.param)


def check_pieces(pieces: tuple[Any, SentencePieceProcessor], text: str) -> None:
    ours, theirs = pieces
    ids = theirs.encode_as_ids(text)
    assert ours.encode(text, False) == ids
    assert ours.encode(text, True) == [theirs.bos_id(), *ids]


@pytest.mark.parametrize("text", HARD)
def test_pieces_are_those_of_sentencepiece(pieces: tuple[Any, SentencePieceProcessor], text: str) -> None:
    check_pieces(pieces, text)


@many
@given(seed=st.integers(0, 2**32 - 1))
def test_pieces_of_prose(pieces: tuple[Any, SentencePieceProcessor], seed: int) -> None:
    chance = random.Random(seed)
    words = " ".join(chance.sample(lines(), 3)).split(" ")
    text = "".join(word + chance.choice([" ", " ", "  ", "\n", ", 12", "é", "日"]) for word in words)
    check_pieces(pieces, text)
    ours, theirs = pieces
    assert ours.decode(ours.encode(text, True), True) == theirs.decode_ids(theirs.encode_as_ids(text)) == text


def test_templates_and_roles(tmp_path: Path) -> None:
    made = hub_tokenizer(*HUB["gpt-2"])

    def more(writer: GGUFWriter) -> None:
        writer.add_chat_template("{{ bos_token }}{{ messages }}")
        writer.add_eos_token_id(5)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    path = write_bpe(tmp_path / "model.gguf", made, None, more)
    template = find_chat_template(path)
    assert template is not None
    assert template.source == "{{ bos_token }}{{ messages }}"
    assert template.tokens == {"bos_token": "<|end|>", "eos_token": made.id_to_token(5)}
    ours = load_tokenizer(path)
    assert ours.encode("a", True) == [made.token_to_id("<|end|>"), *ours.encode("a", False), 5]
    assert find_chat_template(write_bpe(tmp_path / "plain.gguf", made, None)) is None


def string(value: str) -> gguf.gguf_writer.GGUFValue:
    return gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.STRING)


def array(value: list[Any]) -> gguf.gguf_writer.GGUFValue:
    return gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.ARRAY)


WRONG = {
    "pre": (
        string("grok-2"),
        "'tokenizer.ggml.pre' is 'grok-2', which is not served; the nearest that are:",
    ),
    "model": (string("bert"), "'tokenizer.ggml.model' is 'bert', which is not served; served are: gpt2, gemma4, llama"),
    "tokens": (array(["a", "a"]), "'tokenizer.ggml.tokens' has the token 'a' twice"),
    "merges": (array(["a"]), "'tokenizer.ggml.merges' has 'a', must be pairs of tokens"),
    "token_type": (array([1]), "'tokenizer.ggml.token_type' has 1 elements for 1201"),
    "bos_token_id": (gguf.gguf_writer.GGUFValue(10**6, gguf.GGUFValueType.UINT32), "must be the id of one of 1201"),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_not_served_is_named(key: str, tmp_path: Path) -> None:
    value, message = WRONG[key]
    made = hub_tokenizer(*HUB["gpt-2"])
    path = write_bpe(
        tmp_path / "m.gguf", made, "gpt-2", lambda w: w.kv_data[0].update({f"tokenizer.ggml.{key}": value})
    )
    with pytest.raises(CheckpointError, match=message) as raised:
        load_tokenizer(path)
    assert str(path) in str(raised.value)


def test_merges_of_unknown_tokens_and_long_pieces(tmp_path: Path) -> None:
    made = hub_tokenizer(*HUB["gpt-2"])
    merges = {"tokenizer.ggml.merges": array(["\u4e2d \u6587"])}
    path = write_bpe(tmp_path / "m.gguf", made, "gpt-2", lambda w: w.kv_data[0].update(merges))
    with pytest.raises(CheckpointError, match="the tokenizer of its metadata cannot be built: "):
        load_tokenizer(path)
    tokens = {"tokenizer.ggml.tokens": array(["x" * 300]), "tokenizer.ggml.scores": array([0.0])}
    path = write_pieces(tmp_path / "p.gguf", "llama", lambda w: w.kv_data[0].update(tokens))
    with pytest.raises(CheckpointError, match=r"must be the id of one of 1 tokens|may have 256 characters"):
        load_tokenizer(path)
