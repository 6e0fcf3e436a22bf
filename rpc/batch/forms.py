"""Recognises the form of a batch job's input: Quire's own, or that of OpenAI's Batch API. A file has one form."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rpc.batch.line import OPENAI_KEYS, Line
from rpc.batch.lines import parse_line

Parse = Callable[[int, int, bytes, Path], Line]


def read_lines(path: Path) -> Iterator[Line]:
    """Yields every line that is not blank. Raises OSError."""
    parse = _form_of(path)
    index = 0
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                yield parse(index, number, data, path.parent)
                index += 1


def _form_of(path: Path) -> Parse:
    """Returns the parser for the form of the file's first JSON object."""
    with path.open("rb") as file:
        for data in file:
            try:
                values = json.loads(data)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict):
                return parse_line if values.keys().isdisjoint(OPENAI_KEYS) else _openai_form()
    return parse_line


def _openai_form() -> Parse:
    from rpc.batch.openai_lines import parse_openai_line  # imports pydantic, which other files do without

    return parse_openai_line
