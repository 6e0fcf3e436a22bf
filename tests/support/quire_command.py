"""Runs `quire` in a process that a fork server forked, as its console script does in a new interpreter.

A server whose engines are processes starts a fork server of its own, which imports torch: two seconds of a processor.
Here that one is a fork too, made while this process has one thread; it waits until it is wanted.
tests/rpc/test_forks.py and tests/e2e/test_engine_process.py look at what it imports and how it is started.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

from rpc.engines.forks import ForkServer
from rpc.engines.reaping import die_with_parent

WITH_ENGINE_PROCESSES = {"process", "--replicas", "--max-replicas"}
ROOM = 2**16  # of a command line


class Child:
    """The part of a `subprocess.Popen` that a `ForkServer` needs, for a process that was forked: it has no handle."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # two engines may end it at once, and one of them has reaped it
                os.kill(self.pid, 9)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # reaped by who kills what is left of an engine
                pid, status = self.pid, 0
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def main() -> None:
    if WITH_ENGINE_PROCESSES & {*sys.argv} and "--ray" not in sys.argv and _fork_a_fork_server():
        return
    from quire.__main__ import main as run

    sys.modules["__main__"] = ModuleType("__main__")  # where the command line's library looks for the program's name
    run_and_end(run)


def run_and_end(run: Callable[[], None]) -> None:
    """Runs a function, then ends the process with its exit code and without the interpreter's teardown.

    Teardown visits every object, and so copies the memory that the fork shares: 0.15 s of a processor.
    multiprocessing ends what it forks in the same way. Threads are joined and exit functions run, as before a teardown.
    Any exception but SystemExit leaves, and the interpreter reports it.
    """
    code: object = 0
    try:
        run()
    except SystemExit as error:
        code = error.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _fork_a_fork_server() -> bool:
    """Makes the first fork server of this process the one that is forked here. Returns True in what that one forks."""
    from rpc.engines import launchers

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        _serve_when_wanted(theirs)
        return True
    theirs.close()
    waiting = [Child(pid)]

    class ReadyForkServer(ForkServer):
        def start_process(self, command: list[str], orders: socket.socket) -> subprocess.Popen[bytes]:
            if not waiting:
                return super().start_process(command, orders)
            with ours:
                socket.send_fds(ours, ["\0".join(command).encode()], [orders.fileno()])
            return waiting.pop()  # type: ignore[return-value]

    launchers.ForkServer = ReadyForkServer  # type: ignore[misc]
    return False


def _serve_when_wanted(orders: socket.socket) -> None:
    from rpc.engines import fork_server

    die_with_parent()
    os.setsid()
    os.dup2(2, 1)
    with orders:
        command, descriptors, _, _ = socket.recv_fds(orders, ROOM, 1)
    if not descriptors:
        os._exit(0)  # the server ends without having had an engine
    os.dup2(descriptors[0], 0)
    os.close(descriptors[0])
    sys.argv[:] = command.decode().split("\0")[3:]
    fork_server.main()
