"""A progress bar on standard error for calls that run many prompts."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]
"""Takes the count of prompts that have ended, and of tokens since its last call."""


@contextmanager
def progress_bar(count: int, wanted: bool | None) -> Iterator[Advance]:
    """Shows the count of ended prompts, and tokens a second.

    Args:
        count: Prompts of the call.
        wanted: Whether to show it; None shows it if standard error is a terminal.

    Yields:
        The function to call with each step's output.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _ended, _new: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f} a second"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task, tokens = bar.add_task("", total=count, tokens=0, rate=0.0), 0

        def advance(ended: int, new: int) -> None:
            nonlocal tokens
            tokens += new
            elapsed = bar.tasks[0].elapsed
            bar.update(task, completed=ended, tokens=tokens, rate=tokens / elapsed if elapsed else 0.0)

        yield advance
