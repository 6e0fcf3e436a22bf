"""Starts `quire` by a fork of a process that has imported it, and torch, which takes a command two seconds or more.

A forked command is a child of the test's process with the product's own code, arguments, environment, descriptors and
signals. It does not show how the command is installed, what it imports and how its interpreter is torn down: for that
there is `QUIRE` itself.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rpc.engines.forks import ForkOrder, ForkServer
from rpc.engines.launchers import PRELOADED
from tests.support.quire_command import Child

QUIRE = str(Path(sys.executable).parent / "quire")
ROOT = Path(__file__).parents[2]
MODULE = "tests.support.quire_command"
IMPORTED = (
    *PRELOADED,
    "rpc.engines.follower",
    "rpc.cli.main",
    "rpc.server",
    "rpc.engines.joined",
    "rpc.gateway.process",
    MODULE,
)


class Forks:
    """The fork server of this process's tests, which starts when it is first needed, by whichever thread.

    A thread of its own starts it: the kernel ends a fork server with the thread that started it.
    """

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._starting, self._starter = threading.Lock(), ThreadPoolExecutor(1)

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    def running(self) -> ForkServer:
        with self._starting:
            if self._server is None:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("PYTHONPATH", str(ROOT))
                    # One thread an engine: those of several servers would spin for each other's processors. Engines of
                    # installed commands have as many as the machine.
                    patch.setenv("OMP_NUM_THREADS", "1")
                    server = self._starter.submit(ForkServer, IMPORTED).result()
                server.wait_ready()
                self._server = server
            return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


FORKS = Forks()


class ForkedForkServer(ForkServer):
    """A fork server for engines of this process's hosts, which `FORKS` forks: it need not import torch."""

    def start_process(self, command: list[str], orders: socket.socket) -> subprocess.Popen[bytes]:
        order = ForkOrder(command[3], command[3:], command, dict(os.environ), str(Path.cwd()))
        return Child(FORKS.running().fork(order, orders.fileno(), 2, 2))  # type: ignore[return-value]


class Forked(subprocess.Popen):
    """A command, as `subprocess.Popen` of it, but forked where there are fork servers.

    Args:
        module: Module whose `main` the command runs.
        command: Command line.
        title: Command line that `ps` shows.
        options: Of `subprocess.Popen`.
    """

    def __init__(self, module: str, command: list[str], title: list[str], **options: Any) -> None:
        self._module, self._title = module, title
        super().__init__(command, **options)

    def _execute_child(  # type: ignore[no-untyped-def]  # the one step of Popen that starts a process
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, *rest,
    ) -> None:  # fmt: skip
        if sys.platform != "linux":
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, *rest,
            )  # fmt: skip
            return
        environment: Mapping[str, str] = os.environ if env is None else env
        place = str(cwd or Path.cwd())
        order = ForkOrder(self._module, args, self._title, dict(environment), place, start_new_session)
        standard = [own if theirs == -1 else theirs for own, theirs in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = FORKS.running().fork(order, *standard)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class Quire(Forked):
    """A `quire` command, as `subprocess.Popen` of `[QUIRE, *arguments]`."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        command = [QUIRE, *arguments]
        super().__init__(MODULE, command, [sys.executable, *command], **options)  # as the script's first line has it


def run_quire(*arguments: str, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a `quire` command to its end, as `subprocess.run` with its output captured as text."""
    pipe = subprocess.PIPE
    with Quire(
        *arguments, **{"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True} | options
    ) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)
