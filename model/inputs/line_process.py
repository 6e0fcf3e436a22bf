"""A process of Quire's own for an untrusted program: each line of JSON that it gets is answered by one line of JSON."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

WAIT = 10.0  # seconds for an answer, also where the process gets no processor


class LineProcess:
    """The process. It ends with this one in any case, as its input ends then."""

    def __init__(self, module: str) -> None:
        """Starts `python -m module`.

        Raises:
            OSError: The process cannot be started.
        """
        self._process = subprocess.Popen(  # noqa: S603 - the module is one of Quire's own
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},  # a locale's archive would take of its address space
        )

    def ask(self, line: str, most: int, wait: float = WAIT) -> dict[str, Any] | None:
        """Sends a line and returns its answer of at most `most` bytes. None where none comes within `wait` seconds."""
        process = self._process
        timer = threading.Timer(wait, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            answer = process.stdout.readline(most)  # type: ignore[union-attr]
        except OSError:
            answer = b""
        finally:
            timer.cancel()
        return json.loads(answer) if answer.endswith(b"\n") else None

    def close_input(self) -> None:
        """Asks the process to end."""
        self._process.stdin.close()  # type: ignore[union-attr]

    def kill(self) -> None:
        """Kills the process; a thread that waits for its answer gets None."""
        self._process.kill()

    def end(self) -> int:
        """Ends the process and returns its exit code."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # unsent bytes have no reader
                pipe.close()  # type: ignore[union-attr]
        return self._process.wait()
