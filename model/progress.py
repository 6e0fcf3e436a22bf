"""A bar on the terminal while something large is read."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE = 2**30  # bytes; less is read sooner than a bar


@contextmanager
def progress_bar(what: str, size: int) -> Iterator[Callable[[int], object] | None]:
    """Shows a progress bar in the body of the `with`.

    Args:
        what: The bar's label.
        size: Bytes in all.

    Yields:
        A function that takes the number of bytes of each read. None without a bar: standard error is no terminal, or
            the size is small.
    """
    if size < LARGE or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("quire: {task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda read: progress.advance(task, read)
