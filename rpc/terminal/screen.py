"""Shows the live picture on a terminal until a person ends it."""

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
from rpc.terminal.watch import ServerWatch

LOOK = 0.1  # seconds between two polls of the keyboard
ENDING = {b"q", b"Q", b"\x03", b"\x04", b""}  # also Ctrl-C, Ctrl-D and the end of a closed terminal


def show(console: Console, watch: ServerWatch) -> None:
    """Draws snapshots until q or Ctrl-C. Raises QuireError if another try cannot help."""
    snapshot = watch.next(0) or Snapshot("")
    drawn: tuple[Snapshot, int, int] | None = None
    with suppress(KeyboardInterrupt), _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not _wants_to_end():
            snapshot = watch.next(LOOK) or snapshot
            now = snapshot, console.width, console.height
            if drawn != now:  # also after a change of the terminal's size
                live.update(picture(*now), refresh=True)
                drawn = now


@contextmanager
def _keys() -> Iterator[None]:
    """Sets the terminal so that each key arrives at once, without an echo."""
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
