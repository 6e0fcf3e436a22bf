"""A server waits for an engine's process, and nothing of one stays."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from rpc.engines import process as module
from rpc.engines.process import EngineStartError, connect, private_directory
from rpc.engines.reaping import kill_session
from tests.support.processes import is_alive, wait_until


class Client:
    """A link that is made as a test says."""

    def __init__(self, made: Callable[[], Awaitable[None]]) -> None:
        self.connect = made


async def never() -> Any:
    await asyncio.Event().wait()


async def at_once() -> None:
    pass


async def refused() -> None:
    raise ConnectionError("it hung up")


async def waited(made: Callable[[], Awaitable[None]], ended: Awaitable[str], seconds: float = 20.0) -> None:
    """No task of it is left."""
    before = asyncio.all_tasks()
    try:
        await connect(Client(made), ended, seconds)  # type: ignore[arg-type]
    finally:
        assert asyncio.all_tasks() == before


async def test_an_engine_that_is_there_is_waited_for_no_longer() -> None:
    await waited(at_once, never())


async def test_one_that_is_not_there_in_time_is_given_up() -> None:
    with pytest.raises(EngineStartError, match=r"not ready within --engine-start-timeout 0\.01 s"):
        await waited(never, never(), 0.01)


async def test_one_that_hangs_up_is_asked_for_its_last_words() -> None:
    async def later() -> str:
        await asyncio.sleep(0.01)
        return "there is no memory"

    with pytest.raises(EngineStartError, match=r"^there is no memory$"):
        await waited(refused, later())


async def test_one_that_hangs_up_and_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.01)

    with pytest.raises(EngineStartError, match="hung up and did not end"):
        await waited(refused, never())


@pytest.mark.parametrize("place", ["/tmp", "/tmp/a-place-that-is-too-long-for-sockets"])  # noqa: S108
def test_a_private_directory_is_its_owners_and_its_path_is_short(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: place)
    directory = private_directory()
    try:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert str(directory.parent) == "/tmp"  # noqa: S108
    finally:
        directory.rmdir()


@pytest.mark.parametrize("began", ["", '{"model'])
def test_an_engine_whose_server_stops_before_it_is_configured_ends_without_a_word(began: str) -> None:
    command = [sys.executable, "-P", "-m", "rpc.engines.engine_process", "unix-abstract:quire-never"]
    done = subprocess.run(command, input=began, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_what_a_killed_leader_left_is_killed_though_nobody_reaps_the_leader() -> None:
    code = f"import subprocess; print(subprocess.Popen({SLEEPER!r}).pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        left = psutil.Process(int(leader.stdout.readline()))
        wait_until(lambda: psutil.Process(leader.pid).status() == psutil.STATUS_ZOMBIE, "the end of the leader")
        assert os.getsid(left.pid) == leader.pid
        kill_session(leader.pid)
        assert not is_alive(left)


def test_a_leader_can_kill_its_session_and_live() -> None:
    code = f"""
import os, subprocess
from rpc.engines.reaping import kill_session
child = subprocess.Popen({SLEEPER!r})
kill_session(os.getpid())
print(child.wait(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, "-9\n")
