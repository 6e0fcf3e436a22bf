"""The live picture on a terminal, until somebody has seen enough."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live

from rpc.terminal.snapshot import Snapshot
from rpc.terminal.view import picture
from rpc.terminal.watch import Watch

LOOK = 0.1  # seconds between two looks at the keyboard
ENDING = {b"q", b"Q", b"\x03", b"\x04", b""}  # also Ctrl-C, Ctrl-D and a terminal that has gone


def show(console: Console, watch: Watch) -> None:
    """Until q or Ctrl-C. Raises QuireError where looking again cannot help."""
    snapshot = watch.next(0) or Snapshot("")
    drawn: tuple[Snapshot, int, int] | None = None
    with suppress(KeyboardInterrupt), _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not _wants_to_end():
            snapshot = watch.next(LOOK) or snapshot
            now = snapshot, console.width, console.height
            if drawn != now:
                live.update(picture(*now), refresh=True)
                drawn = now


@contextmanager
def _keys() -> Iterator[None]:
    """Each key comes at once and is not shown."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wants_to_end() -> bool:
    if not sys.stdin.isatty():
        return False
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in ENDING
