"""A server's end of its fork server: has it fork a process, which becomes a child of this one.

`rpc.engines.fork_server` is the other end, and says how the two speak.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rpc.engines.reaping import adopt_orphans

READY = "ready"
TITLE_ROOM = "." * 1024
"""Last argument of a fork server. Its bytes are where `ps` finds the command lines of the processes that it forks."""


class ForkError(OSError):
    """The fork server could not fork, or has ended; says why."""


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """What a forked process is to run.

    Attributes:
        module: Its `main()` runs, without arguments.
        arguments: `sys.argv`.
        title: What `ps` shows as its command line.
        environment: All of it. What libraries read as they were loaded has been read.
        directory: Where it runs.
        new_session: Whether it leads a session of its own, which a terminal's Ctrl-C does not reach.
    """

    module: str
    arguments: Sequence[str]
    title: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    new_session: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "ForkOrder":
        return ForkOrder(**json.loads(text))


class ForkServer:
    """A process that imports modules and then forks on demand. Linux only; methods block, and may run on any thread.

    The process that makes one becomes the parent of all that is forked (a child subreaper, prctl(2)), so that it sees
    their exit codes, and they end with it. They do not end with the fork server.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """Args: modules: to import, in this order. Raises OSError."""
        adopt_orphans()
        self._orders, theirs = socket.socketpair()
        # OpenBLAS starts threads as numpy loads it, and a fork server must have none.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "rpc.engines.fork_server", *modules, TITLE_ROOM]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
                command, stdin=theirs.fileno(), stdout=2, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Waits until everything is imported. Due once, before the first `fork`. Raises ForkError."""
        answer = _read_answer(self._orders)
        if READY not in answer:
            raise ForkError(answer["error"])

    def fork(self, order: ForkOrder, stdin: int, stdout: int, stderr: int) -> int:
        """Has a process forked that runs the order with these descriptors, which stay open here.

        Returns its id, once it is a child of this process, which has to reap it.

        Raises:
            OSError: The fork server has ended, or cannot fork.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._orders, [b"\n"], [stdin, stdout, stderr, theirs.fileno()])
            ours.sendall(order.to_json().encode() + b"\n")
            answer = _read_answer(ours)
        if "error" in answer:
            raise ForkError(answer["error"])
        return int(answer["pid"])

    def close(self) -> None:
        """Ends the fork server, not what it forked. A second call does nothing."""
        self._process.kill()  # it has nothing to lose, and may be importing
        self._process.wait()
        self._orders.close()


def _read_answer(connection: socket.socket) -> dict[str, Any]:
    """Returns one line's object. Raises ForkError where the other end has ended."""
    line = read_line(connection)
    if not line:
        raise ForkError("the fork server has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


def read_line(connection: socket.socket) -> bytes:
    """Returns a line, or what came before the other end hung up; nothing behind the line is read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        try:
            waiting = connection.recv(2**16, socket.MSG_PEEK)
        except ConnectionError:
            waiting = b""
        if not waiting:
            return b""
        end = waiting.find(b"\n") + 1 or len(waiting)
        line += connection.recv(end)
    return bytes(line)
