"""Verifies a checkpoint's files against SHA-256 sums, in the format of `sha256sum`."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from model.errors import CheckpointError
from model.files import open_regular, read_text_file

MANIFEST = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def verify_files(directory: Path, needed: list[Path], progress: Callable[[int], object] | None = None) -> int:
    """Verifies all files that the directory's manifest names.

    Args:
        directory: Model directory.
        needed: Files that the manifest must name.
        progress: Called with the number of bytes after each read.

    Returns:
        The number of files that were verified; 0 without a manifest.

    Raises:
        CheckpointError: A file differs, cannot be read, or is not in the manifest, or the manifest is malformed.
    """
    manifest = directory / MANIFEST
    if not manifest.exists():
        return 0
    sums = _read(manifest)
    for path in needed:
        if path.name not in sums:
            raise CheckpointError(f"{manifest} has no sum of {path.name}")
    for name, expected in sums.items():
        path = directory / name
        try:
            found = _sum(path, progress)
        except OSError as error:
            raise CheckpointError(f"{path}, which {MANIFEST} names, cannot be read: {error}") from None
        if found != expected:
            raise CheckpointError(
                f"{path} is not what it was when {MANIFEST} was made: its SHA-256 is {found}, not {expected}. "
                "Download or copy it again"
            )
    return len(sums)


def _read(manifest: Path) -> dict[str, str]:
    """Reads a manifest: sums by the name of a file in the same directory."""
    sums: dict[str, str] = {}
    for number, line in enumerate(read_text_file(manifest).splitlines(), 1):
        found = LINE.fullmatch(line)
        name = found.group(2).removeprefix("./") if found else ""
        if found is None or "/" in name or name in (".", ".."):
            raise CheckpointError(f"{manifest}: line {number} is no SHA-256 sum of a file in this directory")
        sums[name] = found.group(1)
    return sums


def _sum(path: Path, progress: Callable[[int], object] | None) -> str:
    total = hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(2**22):
            total.update(part)
            if progress is not None:
                progress(len(part))
    return total.hexdigest()
