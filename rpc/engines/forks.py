"""The server's end of the fork server: asks it for processes, which become children of this one.

`rpc.engines.fork_server` is the other end, and describes the protocol.
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
"""Last argument of a fork server. Forked processes overwrite its bytes with their own command lines, for `ps`."""


class ForkError(OSError):
    """The fork server could not fork, or has ended; the message has the cause."""


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """Program that a forked process is to run.

    Attributes:
        module: Module whose `main()` runs, without arguments.
        arguments: Its `sys.argv`.
        title: Command line that `ps` shows.
        environment: Its whole environment. Variables that libraries read at import have no effect any more.
        directory: Its working directory.
        new_session: It leads a session of its own, which a terminal's Ctrl-C does not reach.
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

    The process that makes one becomes the parent of all forked processes (a child subreaper, prctl(2)). It sees their
    exit codes, and they end with it. They do not end with the fork server.

    Args:
        modules: Modules to import, in this order.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        adopt_orphans()
        self._orders, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "rpc.engines.fork_server", *modules, TITLE_ROOM]
        with theirs:
            self._process = self.start_process(command, theirs)

    def start_process(self, command: list[str], orders: socket.socket) -> subprocess.Popen[bytes]:
        """Starts the fork server, whose standard input is `orders`. Subclasses may start it in another way."""
        # OpenBLAS starts threads as numpy loads it, and a fork server must have none.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
            command, stdin=orders.fileno(), stdout=2, env=environment, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Waits until all modules are imported. Called once, before the first `fork`.

        Raises:
            ForkError: The fork server has ended, or cannot serve.
        """
        answer = _read_answer(self._orders)
        if READY not in answer:
            raise ForkError(answer["error"])

    def fork(self, order: ForkOrder, stdin: int, stdout: int, stderr: int) -> int:
        """Has a process forked that runs the order.

        Args:
            order: Program to run.
            stdin: Descriptor of its standard input. The descriptors stay open in this process.
            stdout: Descriptor of its standard output.
            stderr: Descriptor of its standard error.

        Returns:
            Id of the process, which is a child of this one by now. The caller has to reap it.

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
        """Ends the fork server, not the processes that it forked. A second call does nothing."""
        self._process.kill()  # it has nothing to lose, and may be importing
        self._process.wait()
        self._orders.close()


def _read_answer(connection: socket.socket) -> dict[str, Any]:
    """Returns the object of one line. Raises ForkError where the other end has ended."""
    line = read_line(connection)
    if not line:
        raise ForkError("the fork server has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


def read_line(connection: socket.socket) -> bytes:
    """Returns a line, or b"" where the other end hung up before its end. Reads nothing behind the line."""
    line = bytearray()
    while not line.endswith(b"\n"):
        try:
            waiting = connection.recv(2**16, socket.MSG_PEEK)  # a peek, since bytes behind the line are not ours
        except ConnectionError:
            waiting = b""
        if not waiting:
            return b""
        end = waiting.find(b"\n") + 1 or len(waiting)
        line += connection.recv(end)
    return bytes(line)
