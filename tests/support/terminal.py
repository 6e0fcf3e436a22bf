"""A pseudo-terminal with a program in it, and the screen that the program has drawn there."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.support.server import clean_environment

PATIENCE = 30.0
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Terminal:
    """text: all that has been written to it, without colours and movements of the cursor. process: the program."""

    def __init__(self, process: subprocess.Popen, master: int) -> None:
        self.process, self._master = process, master
        self._written = b""

    @property
    def text(self) -> str:
        return CONTROL.sub("", self._written.decode(errors="replace")).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, pattern: str, since: int = 0, seconds: float = PATIENCE) -> re.Match[str]:
        """Until the text from there on has it; fails with what it has."""
        deadline = time.monotonic() + seconds
        while (found := re.compile(pattern, re.DOTALL).search(self.text, since)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.text[since:][-3000:]}"
            assert self._read(0.1) or self.process.poll() is None, f"{pattern!r} is not in {self.text[since:][-3000:]}"
        return found

    def wait(self) -> int:
        """For the program's end; how it ended."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on: {self.text[-2000:]}"
            self._read(0.05)
        while self._read(0.05):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        data = b""
        with suppress(OSError):  # the program has closed its side
            data = os.read(self._master, 65536) if ready else b""
        self._written += data
        return bool(data)


@contextmanager
def running_terminal(command: Sequence[str], columns: int = 120, lines: int = 40) -> Iterator[Terminal]:
    """Afterwards the program is gone."""
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = clean_environment() | {"TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        # A session of its own with this terminal, so that Ctrl-C is a signal to it.
        process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    finally:
        os.close(master)
