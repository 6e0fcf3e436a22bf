"""Ends and reaps processes, so that none outlives its parent and a killed one leaves nothing behind."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # options of prctl(2)
KILL_SECONDS = 10.0  # longest end of killed processes


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends. Does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose own parent ends. Does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap() -> None:
    """Takes the exit codes of all ended children, which would stay as zombies otherwise."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def kill_session(leader: int) -> None:
    """Kills every process of the session that `leader` started, but never this process.

    A session outlives its leader, so this finds processes that a killed leader left. Those that this process has
    adopted are reaped; the leader is reaped by the one that waits for it.

    Args:
        leader: Process id of the session's leader, alive or not.

    Raises:
        TimeoutError: A process is still there after KILL_SECONDS.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while members := _members(leader):
        for pid in members:
            _kill(pid)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {members} were killed and are still there after {KILL_SECONDS:g} s")
        time.sleep(0.01)
    if leader != os.getpid():  # children in this process's own session are waited for by the code that started them
        for pid in psutil.pids():
            if pid != leader and _session(pid) == leader:
                with suppress(ChildProcessError):  # a child of another process
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
