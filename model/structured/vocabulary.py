"""The bytes of a model's tokens, as llguidance reads them."""

from pathlib import Path

from llguidance import LLTokenizer

from model.errors import CheckpointError
from model.inputs.grammars import shown
from model.inputs.tokenizer_files import load_tokenizer


def load_vocabulary(directory: Path, width: int, ends: tuple[int, ...]) -> LLTokenizer:
    """Loads the vocabulary of a model.

    Args:
        directory: Directory of the checkpoint, or its GGUF file.
        width: Width of the logits; ids that the tokenizer does not have are never allowed.
        ends: End tokens of the model, at least one.

    Raises:
        CheckpointError: The tokenizer cannot be read, or is of a kind that llguidance does not read.
    """
    tokenizer = load_tokenizer(directory)
    try:
        return tokenizer.vocabulary(width, ends)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = f"{directory}: its tokenizer is of a kind that structured output does not read: {shown(str(error))}"
        raise CheckpointError(why) from None
