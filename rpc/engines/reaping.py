"""No process outlives its parent, and nothing of a killed one stays."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
PATIENCE = 10.0  # seconds that killed processes may take to go


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children, for `reap`. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap() -> None:
    """Takes the exit codes of all ended children: else they stay as zombies where process 1 does not do it."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def kill_session(leader: int) -> None:
    """Kills every process of the session that `leader` started, itself excepted if it is this process.

    A session outlives its leader, so this finds what a killed leader left. What of that this process has adopted is
    reaped, the leader is not: who waits for it reaps it. Raises TimeoutError for what does not go.
    """
    deadline = time.monotonic() + PATIENCE
    while members := _members(leader):
        for pid in members:
            _kill(pid)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {members} were killed and are still there after {PATIENCE:g} s")
        time.sleep(0.01)
    if leader != os.getpid():  # in its own session are children that it has started, and waits for
        for pid in psutil.pids():
            if pid != leader and _session(pid) == leader:
                with suppress(ChildProcessError):  # another's child
                    os.waitpid(pid, os.WNOHANG)


def _members(leader: int) -> list[int]:
    return [pid for pid in psutil.pids() if pid != os.getpid() and _session(pid) == leader and not _is_zombie(pid)]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
