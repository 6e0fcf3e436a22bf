"""Starts `quire` by a fork of a process that has imported it, and torch, which takes a command two seconds or more.

A forked command is a child of the test's process with the product's own code, arguments, environment, descriptors and
signals. What it does not show is how the command is installed and what it imports: for that there is `QUIRE` itself.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rpc.engines.forks import ForkOrder, ForkServer
from rpc.engines.launchers import PRELOADED

QUIRE = str(Path(sys.executable).parent / "quire")
ROOT = Path(__file__).parents[2]
MODULE = "tests.support.quire_command"
IMPORTED = (*PRELOADED, "rpc.cli.main", "rpc.server", "rpc.engines.joined", "rpc.gateway.process", MODULE)


class Forks:
    """The fork server of this process's tests, which starts when it is first needed."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    def running(self) -> ForkServer:
        if self._server is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(ROOT))
                self._server = ForkServer(IMPORTED)
            self._server.wait_ready()
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


FORKS = Forks()


class Quire(subprocess.Popen):
    """A `quire` command, as `subprocess.Popen` of `[QUIRE, *arguments]`, but forked where there are fork servers."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        super().__init__([QUIRE, *arguments], **options)

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
        title = [sys.executable, *args]  # as the console script's first line has it
        order = ForkOrder(MODULE, args, title, dict(environment), str(cwd or Path.cwd()), start_new_session)
        standard = [own if theirs == -1 else theirs for own, theirs in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = FORKS.running().fork(order, *standard)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


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
