"""generation_config.json of a model directory: its defaults of request parameters, and its end tokens. No torch."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from model.config import ModelConfig, read_end_ids
from model.errors import CheckpointError
from model.fields import Fields, read_json
from model.gguf.split import is_gguf
from scheduler.invalid import InvalidRequest
from scheduler.limits import ModelDefaults
from scheduler.parameter import Parameter, parameters_of
from scheduler.parameters import Sampling

log = logging.getLogger("quire.model")

FILE = "generation_config.json"
MOST_DIGITS = 10  # of an id


def read_defaults(directory: Path, config: ModelConfig) -> ModelDefaults:
    """Reads the defaults of request parameters, if there are any.

    A default that no request could ask for is left out, and logged: the weights are none the worse for it.

    Raises:
        CheckpointError: A file cannot be read, or the end tokens are wrong.
    """
    ends = read_ends(directory, config)
    fields = _fields(directory)
    silent, sampled = ModelDefaults(), _default(fields, "do_sample", True, lambda: fields.get("do_sample", bool, True))
    given: dict[str, Any] = {} if sampled else {"temperature": 0.0}
    for entry in parameters_of(Sampling):
        default = getattr(silent, entry.name, None)  # None: no model has a default of it
        if default is not None and entry.name not in given:
            given[entry.name] = _default(fields, entry.name, default, partial(_value, fields, entry, default))
    return ModelDefaults(**given, eos_token_ids=ends)


def read_ends(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """Reads the tokens that end an output: those of generation_config.json or else config.json, and the tokenizer's.

    The tokenizer's may be missing in the others: a base model that was tuned for conversations can have the files of
    before. vLLM stops at all of them too.

    Raises:
        CheckpointError: A file cannot be read, or the end tokens are wrong.
    """
    fields = _fields(directory)
    ends = read_end_ids(fields.path, fields.values, config.vocabulary) or config.eos_token_ids
    end = None if is_gguf(directory) else _tokenizer_end(directory)
    return ends if end is None or end in ends or end >= config.vocabulary else (*ends, end)


def _fields(directory: Path) -> Fields:
    path = directory / FILE
    return Fields(path, {} if is_gguf(directory) or not path.exists() else read_json(path))


def _default(fields: Fields, name: str, default: Any, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (CheckpointError, InvalidRequest) as error:
        log.warning("%s has a %s that is left out, %r is used: %s", fields.path, name, default, error)
        return default


def _value(fields: Fields, entry: Parameter, default: Any) -> Any:
    value = entry.read(fields.get(entry.name, entry.kind, default))
    entry.check(value)
    return value


def _tokenizer_end(directory: Path) -> int | None:
    """Returns the id of the end token that tokenizer_config.json names.

    None where no file gives it an id, as for the pieces of a tokenizer.model: these have config.json's. Whether the
    files are well-formed is not asked here: whoever loads the tokenizer does.
    """
    config = _objects(directory / "tokenizer_config.json")
    name = config.get("eos_token") or _objects(directory / "special_tokens_map.json").get("eos_token")
    text = name.get("content") if isinstance(name, dict) else name
    if not isinstance(text, str) or not text:
        return None
    listed = config.get("added_tokens_decoder")
    for key, token in listed.items() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and token.get("content") == text and key.isdecimal() and len(key) <= MOST_DIGITS:
            return int(key)
    added = _objects(directory / "tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text:
            return _id(token.get("id"))
    return _id(_objects(directory / "added_tokens.json").get(text))


def _objects(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) if path.exists() else {}
    except CheckpointError:
        return {}


def _id(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
