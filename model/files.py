"""Opens files of a model directory: regular files alone, none read further than its bound. Imports no torch.

A directory may be untrusted. A pipe in it would block the start, a device would be read without end. Symbolic links are
followed, since the cache of the Hugging Face hub consists of them.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from model.errors import CheckpointError

NO_FILE = "{} is no regular file (but a pipe, a device or a directory): replace it by a file"
MIB = 2**20
MOST_BYTES = {
    "tokenizer.json": 64 * MIB,
    "tokenizer.model": 64 * MIB,
    "model.safetensors.index.json": 16 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": 16 * MIB,
    "added_tokens.json": 16 * MIB,
    "SHA256SUMS": 16 * MIB,
}
"""Bytes that a file may have, by name. The largest tokenizer.json of the models that are served has 33 MiB."""

MOST_OTHERS = 4 * MIB
"""Bytes that a file of another name may have: config.json, chat_template.jinja and the like have some thousand."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for unbuffered reading.

    Raises:
        CheckpointError: The path is no regular file, or cannot be opened, or cannot be read in the body of the `with`.
        FileNotFoundError: Nothing exists at the path.
    """
    try:
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(NO_FILE.format(path))
            yield file
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise CheckpointError(NO_FILE.format(path)) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file without blocking. Opening a pipe would wait for its writer; regular files ignore O_NONBLOCK."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_file(path: Path, most: int | None = None) -> bytes:
    """Reads a whole file of bounded size.

    Args:
        path: The file.
        most: Bytes that it may have. None: as its name allows (`MOST_BYTES`).

    Raises:
        CheckpointError: See `open_regular`; or the file is too large.
        FileNotFoundError: Nothing exists at the path.
    """
    most = MOST_BYTES.get(path.name, MOST_OTHERS) if most is None else most
    parts, size = [], 0
    with open_regular(path) as file:
        # The size that the file system reports is not trusted: in /proc it is 0 for endless files.
        while size <= most and (part := file.read(min(MIB, most + 1 - size))):
            parts.append(part)
            size += len(part)
    if size > most:
        raise CheckpointError(f"{path} has more than {most} bytes, which is the most that {path.name} may have")
    return b"".join(parts)


def read_text_file(path: Path) -> str:
    """Reads a text in UTF-8.

    Raises:
        CheckpointError: See `read_file`; or the bytes are no UTF-8.
        FileNotFoundError: Nothing exists at the path.
    """
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read as text: {error}") from None
