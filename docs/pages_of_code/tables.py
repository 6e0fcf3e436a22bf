"""Tables of Markdown."""

from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, and an empty one."""
    yield _row(head)
    yield "|" + "---|" * len(head)
    for row in rows:
        yield _row([cell.replace("|", "\\|") for cell in row])
    yield ""


def text(lines: Iterable[str]) -> str:
    """Joins the lines of a page."""
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
