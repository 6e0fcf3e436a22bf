"""Identifies the model of a directory, or of a GGUF file, by a digest that differs where its weights do."""

import hashlib
import os
from pathlib import Path

from model.files import open_regular
from model.gguf.reader import GGUFFile
from model.gguf.split import is_gguf, part_paths

SAMPLES, SAMPLE_BYTES = 256, 4096
HEADER_BYTES = 2**16


def checkpoint_identity(directory: Path) -> bytes:
    """Returns a digest of the configuration and the weight files, 32 bytes.

    It covers the beginnings of the files, with names and shapes of tensors, and 256 samples of 4 KiB spread over each.
    Hashing all of a large model would take longer than loading it. A model that was trained further differs in
    practically every sample. The beginning of a GGUF file is all of its metadata; its name says nothing.
    """
    digest = hashlib.blake2b(digest_size=32)
    for path, name, beginning in _files(directory):
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{name} {size}\n".encode())
            digest.update(file.read(beginning))
            for i in range(SAMPLES):
                file.seek(size * i // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _files(directory: Path) -> list[tuple[Path, str, int]]:
    """Returns the files of a model, each with its name in the digest and the bytes of its beginning."""
    if is_gguf(directory):
        return [(path, str(part), GGUFFile(path).header) for part, path in enumerate(part_paths(directory))]
    files = sorted((directory / "config.json", *directory.glob("*.safetensors")))
    return [(path, path.name, HEADER_BYTES) for path in files]
