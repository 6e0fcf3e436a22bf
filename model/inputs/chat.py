"""Finds a model's chat template, and the special tokens that it may write.

Both are found as transformers finds them. The template is an untrusted program: this module only reads its source,
`model.inputs.chat_process` runs it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import CheckpointError, shown
from model.fields import read_json
from model.files import read_text_file
from model.gguf.reader import GGUFFile
from model.gguf.split import is_gguf
from model.gguf.tokenizer import special_tokens

FILE, CONFIG, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
PROCESSOR, PROCESSORS_OWN = "processor_config.json", "chat_template.json"  # files of vision-language models
METADATA = "tokenizer.chat_template"  # key of a GGUF file
LONGEST = 2**20  # bytes of a template; those of the Hub have some thousand


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template and the special tokens that it may write.

    Attributes:
        source: The template in Jinja.
        path: File that it comes from.
        tokens: Special tokens by name, as bos_token.
    """

    source: str
    path: Path
    tokens: dict[str, str]


def find_chat_template(directory: Path, sees: bool = False) -> ChatTemplate | None:
    """Finds a model's chat template.

    Args:
        directory: Model directory, or GGUF file.
        sees: Whether it is a vision-language model. Its processor's files come before the tokenizer's.

    Returns:
        The template. None where the model has none, or several of which none is named default.

    Raises:
        CheckpointError: A file cannot be read.
    """
    if is_gguf(directory):
        own = GGUFFile(directory).metadata.fields.get(METADATA, str, "")
        return ChatTemplate(_bounded(own, directory), directory, special_tokens(directory)) if own else None
    tokens = _tokens(directory, _json(directory / CONFIG))
    places = [PROCESSOR, PROCESSORS_OWN, FILE, CONFIG] if sees else [FILE, CONFIG]
    for path in (directory / name for name in places):
        source = _source(path)
        if source is not None:
            return ChatTemplate(_bounded(source, path), path, tokens)
    return None


def _source(path: Path) -> str | None:
    """Returns the template in a file. None where it has none or does not exist."""
    if path.name == FILE:
        return read_text_file(path) if path.exists() else None
    source = _json(path).get("chat_template")
    if isinstance(source, list):
        source = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
    if isinstance(source, dict):
        source = source.get("default")
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"{path}: 'chat_template' is {shown(source)}, must be text")
    return source


def _json(path: Path) -> dict[str, Any]:
    """Reads a JSON file; empty where it does not exist."""
    return read_json(path) if path.exists() else {}


def _bounded(source: str, path: Path) -> str:
    if len(source) > LONGEST:
        raise CheckpointError(f"{path}: the chat template has {len(source)} characters, may have {LONGEST}")
    return source


def _tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns special tokens by name.

    special_tokens_map.json counts only beside a config of the old style, which does not list the added tokens.
    """
    values = config if "added_tokens_decoder" in config else config | _json(directory / TOKENS)
    named = {name: value for name, value in values.items() if name.endswith("_token")}
    more = values.get("extra_special_tokens")
    tokens = named | (more if isinstance(more, dict) else {})
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
