"""Trains a tokenizer as large as a model's vocabulary: masks of constraints take as long as their tokens are many."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = 60 * 2**20  # bytes that the tokenizer is trained on
END = "<|end|>"
"""Token 0, which ends a text."""


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Trains and writes a byte-level BPE of so many tokens, whose first one ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_sources(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def _sources() -> Iterator[str]:
    size = 0
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for file in sorted(Path(folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="ignore")
            size += len(text)
            if size > CORPUS:
                return
            yield text
