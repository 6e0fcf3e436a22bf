"""What the commands share: sizes, the configuration file, flags in the order command line > file > environment."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import typer

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
ENVIRONMENT = "QUIRE_"


def parse_size(text: str) -> int:
    """Bytes in "512MiB", "2G", "1073741824". Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size: write 512MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2].upper()])


def load_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Option callback of --config: takes the file's and the environment's values as the command's defaults."""
    known = {p.name for p in context.command.params if p.name} - {"config"}
    values: dict[str, Any] = {
        key: os.environ[ENVIRONMENT + key.upper()] for key in known if ENVIRONMENT + key.upper() in os.environ
    }
    if path is not None:
        values |= _read(path, known)
    context.default_map = {**(context.default_map or {}), **values}
    return path


def _read(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    values = {key.replace("-", "_"): value for key, value in content.items()}
    unknown = sorted(values.keys() - known)
    if unknown:
        flags = ", ".join(sorted(k.replace("_", "-") for k in known))
        raise typer.BadParameter(f"{path}: unknown key {unknown[0]!r}. Known: {flags}")
    return values
