"""A tokenizer is a program: it is tried before it is used, and what it fails on ends one request."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from model.errors import CheckpointError
from model.inputs import trial
from model.inputs.tokenizer import TokenizerFailed
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.trial import try_tokenizer
from model.inputs.trial_process import units_of
from model.settings import ModelSettings
from rpc.frontend.errors import RequestFailed
from rpc.frontend.prepare import Preparer, load_preparer
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Sampling
from scheduler.spec import Spec
from tests.support.checkpoints import byte_tokenizer
from tests.support.sentence_pieces import write as write_sentence_pieces

LIMITS = Limits(vocabulary=320, context=1000, pool_tokens=1000, sequences=4)


def write(directory: Path, **parts: Any) -> Path:
    """The byte tokenizer with other parts."""
    directory.mkdir(exist_ok=True)
    values = json.loads(byte_tokenizer().to_str()) | parts
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return directory


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replace(text: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def sequence(*parts: dict[str, Any], key: str) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


def template(parts: int) -> dict[str, Any]:
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {"type": "TemplateProcessing", "single": [text] * parts, "pair": [text, other], "special_tokens": {}}


def characters_map(texts: bytes) -> dict[str, Any]:
    """A trie of one node, in which the search for any character goes astray."""
    compiled = (4).to_bytes(4, "little") + b"\xff" * 4 + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(compiled).decode()}


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

HARMLESS: dict[str, dict[str, Any]] = {
    "as GPT-2's": {},
    "as Llama 3's": {"pre_tokenizer": sequence(split(LLAMA3), BYTES, key="pretokenizers")},
    "as Llama 2's": {
        "pre_tokenizer": None,
        "normalizer": sequence({"type": "Prepend", "prepend": "_"}, replace(" ", "_"), key="normalizers"),
    },
    "NFKC, of 18 letters for one": {"normalizer": {"type": "NFKC"}},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "exponential time": ({"pre_tokenizer": split("(x+x+)+y")}, "retry-limit-in-match over"),
    "exponential time, of a rare letter": ({"pre_tokenizer": split(r"(\x{0451}+)+\x62")}, "retry-limit-in-match over"),
    "quadratic time": ({"pre_tokenizer": split("q+b")}, r"\('q'\), in 16 parts"),
    "quadratic time, of spaces": ({"pre_tokenizer": split(r"\s+z")}, r"\(' '\), in 16 parts"),
    "a rare text becomes a long one": ({"normalizer": replace("qz", "q" * 200)}, r"makes \d+ characters of"),
    "texts grow step by step": (
        {"normalizer": sequence(*[replace("q", "qq")] * 30, key="normalizers")}, "memory|ends its process",
    ),
    "decoded texts grow": (
        {"decoder": sequence(BYTES, *[replace("a", "aaaa")] * 4, key="decoders")}, r"decodes \d+ tokens to \d+ char",
    ),
    "a text a hundred times": ({"post_processor": template(100)}, "makes .* tokens of|memory|ends its process"),
    "a map that panics": ({"normalizer": characters_map(b"")}, "index out of bounds"),
    "a map with a long text": ({"normalizer": characters_map(b"\0" + b"x" * 5000 + b"\0")}, "by 5000 bytes, may by"),
    "a long token": (
        {"model": {"type": "WordLevel", "vocab": {"a" * 5000: 0}, "unk_token": "?"}}, "5000 characters, may have 4096",
    ),
    "one word of any length, piece by piece": (
        {
            "model": {
                "type": "WordPiece", "vocab": {"a": 0, "##a": 1, "?": 2}, "unk_token": "?",
                "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9,
            },
            "pre_tokenizer": None,
        },
        "1 s of processor time|in 16 parts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HARMLESS)
def test_tokenizers_of_models_are_let_pass(kind: str, tmp_path: Path) -> None:
    """`try_tokenizer` raises where one is refused."""
    try_tokenizer(write(tmp_path / "m", **HARMLESS[kind]))


def test_sentence_pieces_are_let_pass(tmp_path: Path) -> None:
    """`try_tokenizer` raises where one is refused."""
    try_tokenizer(write_sentence_pieces(tmp_path / "m", "nfkc that keeps spaces"))


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.sample(4)
def test_a_tokenizer_out_of_proportion_to_its_texts_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "BASE_SECONDS", 1 if "piece by piece" in kind else 20)
    parts, message = REFUSED[kind]
    directory = write(tmp_path / "m", **parts)
    with pytest.raises(CheckpointError, match=message) as caught:
        try_tokenizer(directory)
    assert str(directory / "tokenizer.json") in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_that_cannot_be_read_is_named_as_without_a_trial(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        try_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        try_tokenizer(tmp_path / "nowhere")


def test_a_server_tries_the_tokenizer_of_its_model(tiny: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "m", pre_tokenizer=split("(x+x+)+y"))
    (directory / "config.json").symlink_to(tiny / "config.json")
    with pytest.raises(CheckpointError, match="cannot be served safely"):
        load_preparer(ModelSettings(str(directory)))


def test_padding_and_truncation_are_taken_off(tmp_path: Path) -> None:
    """As transformers does: 10^9 tokens of padding ended the process."""
    padding = {
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    plain = load_tokenizer(write(tmp_path / "plain"))
    changed = load_tokenizer(write(tmp_path / "changed", padding=padding, truncation=truncation))
    assert changed.encode("the cat sat", True) == plain.encode("the cat sat", True)


def test_units_of_expressions() -> None:
    assert {"b", "q", "qz", "+", "\u0451"} <= set(units_of([r"q+\x{0451}\u0062", "qz", ""]))
    assert "\ud800" not in units_of([r"\ud800\x{FFFFFF}"])
    assert len(units_of(["".join(map(chr, range(0x4E00, 0x5000)))])) == 64


MISSING: dict[str, dict[str, Any]] = {
    "words": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
    "pieces of words": {
        "type": "WordPiece", "vocab": {"a": 0}, "unk_token": "<unk>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
    "likeliest pieces": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None, "byte_fallback": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", MISSING)
def test_texts_that_a_vocabulary_has_not_end_one_request(kind: str, tmp_path: Path) -> None:
    """By name; they ended in INTERNAL with a traceback in the log."""
    directory = write(tmp_path / "m", model=MISSING[kind], pre_tokenizer=None, added_tokens=[])
    try_tokenizer(directory)
    preparer = Preparer("m", load_tokenizer(directory), ModelDefaults())
    assert list(preparer.prepare(Spec("a"), LIMITS).prompt) == [0]
    for field, ask in (
        ("text", lambda: preparer.prepare(Spec("b"), LIMITS)),
        ("text", lambda: preparer.tokenize("b", True, "", LIMITS)),
        ("sampling.bad_words", lambda: preparer.prepare(Spec("a", sampling=Sampling(bad_words=("b",))), LIMITS)),
    ):
        with pytest.raises(RequestFailed, match="the model's tokenizer cannot encode this text") as caught:
            ask()
        assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", field)


def test_a_panic_of_the_library_is_an_error_like_others(tmp_path: Path) -> None:
    """It is no Exception, and would end the thread that meets it."""
    tokenizer = load_tokenizer(write(tmp_path / "m", normalizer=characters_map(b"")))
    with pytest.raises(TokenizerFailed) as caught:
        tokenizer.encode("a", True)
    assert caught.value.panicked


@pytest.mark.parametrize("token", [-1, 2**32, 2**64, 10**400])
def test_ids_that_no_vocabulary_has(token: int, tmp_path: Path) -> None:
    """config.json names some, of images."""
    assert load_tokenizer(write(tmp_path / "m")).text_of(token) is None
