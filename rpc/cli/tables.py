"""Tables of the command line, narrow enough for 80 columns."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], elastic: Sequence[str], right: Sequence[str] = ()
) -> None:
    """Prints columns without a frame. No value is cut.

    Args:
        columns: Headings.
        rows: Values of each row.
        elastic: Columns whose values wrap if they do not fit.
        right: Columns of figures, aligned to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in elastic,
            overflow="fold",
            vertical="top",
        )
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: clients choose request ids, whose brackets must not act as markup
    Console().print(table)


def written(value: float) -> str:
    """Returns a figure with four digits, a count with all of its own; - for one that is not known."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() and value >= 1 else f"{value:.4g}"
