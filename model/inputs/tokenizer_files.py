"""Loads the tokenizer of a model directory, whichever kind it is."""

from pathlib import Path

from model.errors import CheckpointError
from model.inputs.tokenizer import Tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads tokenizer.json if the directory has one, else tokenizer.model. Raises CheckpointError."""
    path = directory / "tokenizer.json"
    if path.exists():
        return Tokenizer.of_file(path)
    if not (directory / "tokenizer.model").exists():
        raise CheckpointError(f"{path} is missing, and so is tokenizer.model: a model is served with its own")
    from model.inputs.sentence_pieces import SentencePieceTokenizer  # most models do without the library

    return SentencePieceTokenizer.load(directory)
