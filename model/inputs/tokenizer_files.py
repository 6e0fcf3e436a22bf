"""Loads the tokenizer of a model directory, of either kind, or of a GGUF file."""

from pathlib import Path

from model.errors import CheckpointError
from model.gguf.split import is_gguf
from model.gguf.tokenizer import build_tokenizer
from model.inputs.tokenizer import Tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads tokenizer.json if the directory has one, else tokenizer.model. A GGUF file has its own.

    Raises:
        CheckpointError: Neither exists, or it cannot be read.
    """
    if is_gguf(directory):
        return Tokenizer(build_tokenizer(directory))
    path = directory / "tokenizer.json"
    if path.exists():
        return Tokenizer.of_file(path)
    if not (directory / "tokenizer.model").exists():
        raise CheckpointError(f"{path} is missing, and so is tokenizer.model: a model is served with its own")
    from model.inputs.sentence_pieces import SentencePieceTokenizer  # most models do without the library

    return SentencePieceTokenizer.load(directory)
