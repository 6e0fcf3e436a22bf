"""Loads the tokenizer of a model directory, of either kind."""

from pathlib import Path

from model.errors import CheckpointError
from model.inputs.tokenizer import Tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads tokenizer.json if the directory has one, else tokenizer.model.

    Raises:
        CheckpointError: Neither exists, or it cannot be read.
    """
    path = directory / "tokenizer.json"
    if path.exists():
        return Tokenizer.of_file(path)
    if not (directory / "tokenizer.model").exists():
        raise CheckpointError(f"{path} is missing, and so is tokenizer.model: a model is served with its own")
    from model.inputs.sentence_pieces import SentencePieceTokenizer  # most models do without the library

    return SentencePieceTokenizer.load(directory)
