"""Prints a benchmark's figures: a table for people, JSON for programs."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def show(title: str, figures: Mapping[str, Mapping[str, float]], as_json: bool) -> None:
    """Prints figures with a column for each mode.

    Args:
        title: Title of the table.
        figures: Mode to its figures by name. A name is words joined by _ and ends in its unit.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("", title=title)
    for mode in figures:
        table.add_column(mode, justify="right")
    for name in dict.fromkeys(name for row in figures.values() for name in row):
        table.add_row(name.replace("_", " "), *(_written(row.get(name)) for row in figures.values()))
    Console().print(table)


def keep(file: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures so far to a file, anew. A reader, or a cut, finds either the old ones or the new ones.

    Args:
        file: The file; None for none.
        figures: What JSON can say.
    """
    if file is not None:
        beside = file.with_name(f"{file.name}.part")
        beside.write_text(json.dumps(figures, indent=1) + "\n")
        os.replace(beside, file)


def _written(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
