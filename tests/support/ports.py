"""The tables of docs/ports.md."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/ports.md"


@dataclass(frozen=True)
class Row:
    """processes: whose command line has one of these texts. port: "any", a number or a range. bound: an address."""

    processes: tuple[str, ...]
    port: str
    bound: str
    flags: tuple[str, ...]


def rows(section: str) -> list[Row]:
    """Of the table under the heading that begins so."""
    (text,) = (part for part in PAGE.read_text().split("\n## ")[1:] if part.startswith(section))
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [Row(tuple(_code(cells[0])), cells[1].strip(), cells[3].strip(), tuple(_code(cells[5]))) for cells in table]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
