"""How a benchmark shows what it measured: a table for people, JSON for programs."""

import json
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def show(title: str, figures: Mapping[str, Mapping[str, float]], as_json: bool) -> None:
    """figures: of each mode by their names, which are words joined by _ and end in their unit. A column a mode."""
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("", title=title)
    for mode in figures:
        table.add_column(mode, justify="right")
    for name in dict.fromkeys(name for row in figures.values() for name in row):
        table.add_row(name.replace("_", " "), *(_written(row.get(name)) for row in figures.values()))
    Console().print(table)


def _written(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
