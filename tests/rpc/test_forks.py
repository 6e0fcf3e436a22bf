"""The fork server: what it forks is a child of who asks, runs as a new process would, and needs it no more."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from rpc.engines import launchers
from rpc.engines.forks import ForkError, ForkOrder, ForkServer
from rpc.engines.launchers import MODULE, PRELOADED, Forker
from rpc.engines.reaping import kill_session
from tests.support.processes import find, has_loaded, is_alive, tree, wait_until
from tests.support.quire_command import Child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux")

ROOT = Path(__file__).parents[2]
ORDER = ForkOrder(
    "tests.support.forked", ["forked", "an argument"], ["forked", "for", "a-test"], {"ONLY": "this\nvariable"}, "/"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with forking() as running:
        yield running


@contextmanager
def forking(*modules: str, path: Path = ROOT) -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(path))
        running = ForkServer(modules)
    try:
        yield running
    finally:
        running.close()


@dataclass(frozen=True)
class Forked:
    """A forked process and the ends of its standard streams."""

    pid: int
    input: IO[str]
    output: IO[str]
    errors: IO[str]

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.output.readline())
        return told

    def code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def forked(server: ForkServer, order: ForkOrder = ORDER) -> Iterator[Forked]:
    (in_end, input_end), (output_end, out_end), (errors_end, err_end) = os.pipe(), os.pipe(), os.pipe()
    try:
        pid = server.fork(order, in_end, out_end, err_end)
    finally:
        for descriptor in (in_end, out_end, err_end):
            os.close(descriptor)
    with os.fdopen(input_end, "w") as writing, os.fdopen(output_end) as output, os.fdopen(errors_end) as errors:
        yield Forked(pid, writing, output, errors)


@pytest.fixture(scope="module", autouse=True)
def ready(server: ForkServer) -> None:
    server.wait_ready()


def test_a_forked_process_is_a_child_of_who_asks_and_is_what_the_order_says(server: ForkServer) -> None:
    with forked(server) as process:
        told = process.told()
        assert told["pid"] == process.pid
        assert told["parent"] == os.getpid()
        assert told["session"] == process.pid
        assert told["arguments"] == ORDER.arguments
        assert told["directory"] == "/"
        assert told["environment"] == ORDER.environment
        assert told["threads"] == 1
        assert told["descriptors"] == [0, 1, 2], "one of the fork server's is open"
        assert process.errors.readline() == "to standard error\n"
        assert psutil.Process(process.pid).cmdline() == ORDER.title
        process.input.write("7")
        process.input.close()
        assert process.code() == 7
        assert process.output.read() == process.errors.read() == ""


def test_it_can_stay_in_the_session_of_the_fork_server(server: ForkServer) -> None:
    with forked(server, replace(ORDER, new_session=False)) as process:
        assert process.told()["session"] == os.getsid(server.pid) != process.pid
    assert process.code() == 0


def test_a_killed_one_is_seen_to_be_killed(server: ForkServer) -> None:
    with forked(server) as process:
        process.told()
        os.kill(process.pid, signal.SIGKILL)
        assert process.code() == -signal.SIGKILL


def test_signals_that_the_fork_server_ignores_end_what_it_forks(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGINT)
    os.kill(server.pid, signal.SIGTERM)
    with forked(server) as process:
        process.told()
        os.kill(process.pid, signal.SIGTERM)
        assert process.code() == -signal.SIGTERM
    assert server.is_alive


def test_many_at_once_are_as_many_processes(server: ForkServer) -> None:
    with forked(server) as first, forked(server) as second, forked(server) as third:
        pids = [process.told()["pid"] for process in (first, second, third)]
        assert pids == [first.pid, second.pid, third.pid]
        assert len(set(pids)) == 3
    assert [process.code() for process in (first, second, third)] == [0, 0, 0]


def test_forked_processes_outlive_the_fork_server_and_no_more_come() -> None:
    with forking() as server:
        server.wait_ready()
        with forked(server) as process:
            process.told()
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.is_alive, "the end of the fork server")
            with pytest.raises(OSError, match=r"ended|Broken pipe"), forked(server):
                pass
            assert is_alive(psutil.Process(process.pid))
        assert process.code() == 0


ASKING = f"""
import os, time
from rpc.engines.forks import ForkOrder, ForkServer
server = ForkServer([])
server.wait_ready()
pid = server.fork(ForkOrder("tests.support.forked", [], ["forked"], dict(os.environ), {str(ROOT)!r}), 0, 2, 2)
print(server.pid, pid, flush=True)
time.sleep(600)
"""


def test_both_end_with_who_asked_though_they_are_stopped() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", ASKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as asking:
        assert asking.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in asking.stdout.readline().split()]
        assert len(processes) == 2
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        asking.kill()
        asking.wait()
        wait_until(lambda: not any(map(is_alive, processes)), "the end of both", 5)


LEADER = f"""
import subprocess
child = subprocess.Popen({[sys.executable, "-c", "import time; time.sleep(600)"]!r})
print(child.pid, flush=True)
child.wait()
"""


def test_nothing_stays_of_what_this_process_adopts_from_a_killed_engine() -> None:
    """As it does since it asked a fork server for one: a zombie would stay as long as the server."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        child = psutil.Process(int(leader.stdout.readline()))
        leader.kill()
        leader.wait()
        assert child.ppid() == os.getpid()
        kill_session(leader.pid)
        assert not child.is_running()


THREADED = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def test_two_may_end_a_forked_fork_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has reaped it after this one saw it alive: a server of two replicas said "No such process" then."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    child = Child(ended.pid)
    monkeypatch.setattr(child, "poll", lambda: None)
    child.kill()
    assert child.wait() == 0


def test_an_import_that_starts_a_thread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "threading_library.py").write_text(THREADED)
    with (
        forking("threading_library", path=tmp_path) as server,
        pytest.raises(ForkError, match=r"^importing threading_library started 1 threads$"),
    ):
        server.wait_ready()


def test_a_module_that_cannot_be_imported_is_left_to_who_needs_it(server: ForkServer) -> None:
    with forking("no_such_module") as other:
        other.wait_ready()
    with forked(server, replace(ORDER, module="no_such_module")) as process:
        assert "No module named 'no_such_module'" in process.errors.read()
        assert process.code() == 1


def test_what_engines_import_starts_no_thread() -> None:
    """Nor anything of CUDA: then torch is loaded, and nothing of it has been called."""
    with forking(*PRELOADED) as server:
        server.wait_ready()
        assert len(os.listdir(f"/proc/{server.pid}/task")) == 1
        assert has_loaded(server.pid, "libtorch")
        assert not has_loaded(server.pid, "libcuda.so")


# Engines.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server that imports little: these tests load no model."""
    monkeypatch.setattr(launchers, "PRELOADED", (MODULE,))


def fork_server() -> psutil.Process:
    return find(os.getpid(), "rpc.engines.fork_server")


@pytest.mark.usefixtures("quick")
class TestForker:
    """`Forker` in a process without other fork servers."""

    @pytest.fixture(autouse=True)
    def alone(self, server: ForkServer) -> None:
        server.close()

    async def test_its_engines_outlive_its_fork_server_which_is_replaced_when_due(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        forker = Forker()
        first = await forker.start("unix-abstract:quire-test-1", {})
        old = fork_server()
        old.kill()
        wait_until(lambda: not is_alive(old), "the end of the fork server")
        second = await forker.start("unix-abstract:quire-test-2", {})
        assert fork_server().pid != old.pid
        assert "the fork server has ended: starting another one" in caplog.text
        for engine in (first, second):
            assert is_alive(psutil.Process(engine.pid))
            assert engine.stdin is not None
            assert engine.stdout is not None
            engine.stdin.write(b"{}\n")
            engine.stdin.write_eof()  # before the line with the token
            assert await engine.wait() == await engine.wait() == 1
            assert await engine.stdout.read() == b""
            engine.stdin.close()
        await forker.close()
        assert tree(os.getpid()) == []

    async def test_where_there_can_be_no_fork_server_engines_are_spawned(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "starts.py").write_text(THREADED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(launchers, "PRELOADED", ("starts",))
        forker = Forker()
        engines = [await forker.start(f"unix-abstract:quire-test-{number}", {}) for number in range(2)]
        assert caplog.messages == [
            "engines are started without a fork server, which takes longer: importing starts started 1 threads"
        ]
        assert {process.pid for process in tree(os.getpid())} == {engine.pid for engine in engines}
        for engine in engines:
            os.kill(engine.pid, signal.SIGKILL)
            assert await engine.wait() == -signal.SIGKILL
        await forker.close()

    @pytest.mark.parametrize("turns", [1, 3, 10, 30])
    async def test_a_cancelled_start_leaves_no_process(self, turns: int) -> None:
        forker = Forker()
        engine = await forker.start("unix-abstract:quire-test", {})
        assert engine.stdin is not None
        starting = asyncio.create_task(forker.start("unix-abstract:quire-test-2", {}))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        (ended,) = await asyncio.gather(starting, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)
        assert {process.pid for process in tree(os.getpid())} == {engine.pid, fork_server().pid}
        kill_session(engine.pid)
        assert await engine.wait() == -signal.SIGKILL
        engine.stdin.close()
        await forker.close()
