"""Tiny SentencePiece models, trained here, in the directories that models come in."""

import functools
import io
import json
import shutil
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from model.inputs.sentence_pieces import SentencePieceTokenizer
from rpc.paths import demo_directory

OTHERS = "ça va très bien, 日本語のテキスト 🐈 e\u0301 \uff11\uff12\uff13 ﬁ ½ ™ tab\there  two   three"
LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
GEMMA = LLAMA | {
    "add_dummy_prefix": False,
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "pad_piece": "<pad>",
    "eos_piece": "<eos>",
    "bos_piece": "<bos>",
    "user_defined_symbols": ["<mask>", "<start_of_turn>", "<end_of_turn>", "\n\n"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral 3": LLAMA | {"control_symbols": ["[INST]", "[/INST]"]},
    "gemma": GEMMA,
    "gemma's runs of spaces": GEMMA | {"user_defined_symbols": ["<mask>", "▁▁", "▁▁▁", "▁▁▁▁", "\n\n", "\t"]},
    "t5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "unigram that falls back": {"model_type": "unigram", "byte_fallback": True, "user_defined_symbols": ["<x>", "ab"]},
    "bpe that does not": {"model_type": "bpe", "normalization_rule_name": "nfkc", "user_defined_symbols": ["<x>"]},
    "nfkc that keeps spaces": LLAMA | {"normalization_rule_name": "nfkc_cf"},
    "unigram as it comes": LLAMA | {"model_type": "unigram", "add_dummy_prefix": False},
    "spaces at the end": {"model_type": "unigram", "treat_whitespace_as_suffix": True, "byte_fallback": True},
}


@functools.cache
def trained(name: str, pieces: int = 700) -> bytes:
    lines = (demo_directory().parent / "tinyshakespeare.txt").read_text().splitlines()[:1500]
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *[OTHERS] * 20]),
        model_writer=written,
        vocab_size=pieces,
        hard_vocab_limit=False,
        character_coverage=0.999,
        num_threads=1,
        minloglevel=2,
        **SETTINGS[name],
    )
    return written.getvalue()


@functools.cache
def library(name: str) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=trained(name))


def write(directory: Path, name: str, files: dict[str, Any] | None = None, **config: Any) -> Path:
    """A model directory without weights. files: more JSON files. config: of tokenizer_config.json."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "tokenizer.model").write_bytes(trained(name))
    kind = "gemma" if name.startswith("gemma") else "llama"
    config = {"tokenizer_class": {"gemma": "GemmaTokenizer", "llama": "LlamaTokenizer"}[kind]} | config
    more = {"config.json": {"model_type": kind}, "tokenizer_config.json": config}
    for file, content in (more | (files or {})).items():
        (directory / file).write_text(json.dumps(content))
    return directory


def load(directory: Path, name: str, files: dict[str, Any] | None = None, **config: Any) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.load(write(directory, name, files, **config))
