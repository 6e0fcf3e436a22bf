"""A server whose engine is in a process of its own, or in a Ray actor: what it serves, what dies, what is left."""

import asyncio
import os
import re
import shutil
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.paths import demo_directory
from tests.e2e.test_lifecycle import check, serve_and_fail
from tests.e2e.test_streams import (  # noqa: F401 - the tests among them run here too, on this module's servers
    STREAMS,
    read_stream,
    test_batch_answers_every_entry_though_some_fail,
    test_burst_of_short_requests_all_end_properly_and_none_is_refused,
    test_cancelled_batch_counts_every_entry,
    test_cancelled_streams_free_their_pages_and_change_nobody,
    test_deadline_stops_the_work,
    test_output_prefix_goes_on_where_the_output_stopped,
    test_stream_matches_unary_and_accounts_for_every_token,
)
from tests.support.ports import check_those_of_ray
from tests.support.processes import (
    REQUESTS,
    find,
    has_loaded,
    is_alive,
    long_calls,
    session,
    some_tokens,
    started_server,
    statuses_of,
    temporary_directory,
    tree,
    wait_until,
    when_ready,
)
from tests.support.server import READY, RunningServer, running_server, stream_request

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
FLAGS = {"process": ("--engine", "process"), "ray": ("--ray",)}
FORK_SERVER = "rpc.engines.fork_server"
HOST = {"process": "rpc.engines.engine_process", "ray": "rpc.cluster.driver"}  # the server's child
FIRST = {"process": FORK_SERVER, "ray": HOST["ray"]}  # the child that it starts first
SILENCE = "8"  # seconds: a live engine has been silent for more than 2 while other tests kept both cores busy
BEGUN = "quire_time_to_first_token_seconds_count"  # some that have begun can be over when the last one begins
ENGINE = {"process": HOST["process"], "ray": "ray::EngineActor"}  # the process with the model

both_modes = pytest.mark.parametrize("mode", ["process", pytest.param("ray", marks=pytest.mark.slow)])


@dataclass(frozen=True)
class Serving:
    """A server, its mode and its temporary directory."""

    mode: str
    server: RunningServer
    place: Path


@contextmanager
def serving(mode: str, *flags: str, forked: bool = False, **variables: str) -> Iterator[Serving]:
    """Starts the installed command, unless it may be forked: where neither its imports nor its start are looked at."""
    with temporary_directory() as place, running_server(*FLAGS[mode], *flags, forked=forked, **variables) as server:
        yield Serving(mode, server, place)


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """For the tests that leave their server as it was.

    Its engine has one thread: two would wait for each other at each step while other tests have the processors. Servers
    of single tests have as many as the machine.
    """
    with serving(request.param, "--poison-freed-pages", "--kv-cache-memory", "128MiB", OMP_NUM_THREADS="1") as running:
        yield running


@pytest.fixture
def server(shared: Serving) -> RunningServer:
    return shared.server


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Results of a server with the engine in its own process, which test_streams compares with runs alone."""

    async def all_streams(address: str) -> list[list[int]]:
        return await asyncio.gather(*(read_stream(address, seed, None) for seed in range(STREAMS)))

    with running_server("--engine", "thread") as running:
        return asyncio.run(all_streams(running.address))


def test_values_that_cannot_be_served_are_refused(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for field_name, value in (("temperature", 2.5), ("top_p", float("nan"))):
            request = stream_request("ROMEO:", 3, **{field_name: value})
            with pytest.raises(grpc.RpcError) as refused:
                list(server.stub(channel).StreamGenerate(request))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"sampling.{field_name}" in refused.value.details()
        with pytest.raises(grpc.RpcError) as refused:  # more than the engine's pool and the model's context hold
            server.stub(channel).Generate(pb.GenerateRequest(spec=stream_request("ROMEO:", 10**6).spec))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "model context 1024" in refused.value.details()


def test_server_process_has_loaded_neither_torch_nor_ray(shared: Serving) -> None:
    pid = shared.server.process.pid
    assert not has_loaded(pid, "libtorch")
    assert not has_loaded(pid, "_raylet")
    engine = find(pid, ENGINE[shared.mode])
    assert has_loaded(engine.pid, "libtorch")
    assert has_loaded(engine.pid, "_raylet") == (shared.mode == "ray")


def test_nobody_else_can_enter(shared: Serving) -> None:
    """Nor find a dashboard. A process's socket is no file; Ray's files stay while it runs."""
    directories = list(shared.place.glob("quire-*"))
    assert len(directories) == (1 if shared.mode == "ray" else 0)
    for directory in directories:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "token").stat().st_mode) == 0o600
    assert 8265 not in {port for _, port in _listening(shared)}


def test_nothing_listens_beyond_loopback(shared: Serving) -> None:
    assert {address.removeprefix("::ffff:") for address, _ in _listening(shared)} <= {"127.0.0.1", "::1"}


def _listening(shared: Serving) -> list[tuple[str, int]]:
    """Addresses and ports of the server's tree."""
    processes = [psutil.Process(shared.server.process.pid), *tree(shared.server.process.pid)]
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    return [(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN]


def test_what_ray_listens_on_is_said(shared: Serving) -> None:
    if shared.mode == "ray":
        check_those_of_ray(shared.server)


def test_engine_has_the_priority_of_its_server(shared: Serving) -> None:
    pid = shared.server.process.pid
    assert find(pid, ENGINE[shared.mode]).nice() == psutil.Process(pid).nice()


# An engine that dies.


@dataclass(frozen=True)
class Death:
    """A signal to a process of a server's tree."""

    victim: str
    signal: int = signal.SIGKILL


LIVES = {
    "process killed, stopped": [Death(ENGINE["process"]), Death(ENGINE["process"], signal.SIGSTOP)],
    "actor killed": [Death(ENGINE["ray"])],
    "actor stopped": [Death(ENGINE["ray"], signal.SIGSTOP)],
    "driver, raylet, gcs_server killed": [
        Death(HOST["ray"]),
        Death("raylet/raylet"),
        Death("gcs_server"),
    ],
}


@pytest.mark.parametrize("life", list(LIVES))
@pytest.mark.slow
def test_dead_engine_is_replaced_and_every_call_goes_on(life: str) -> None:
    mode = "process" if life.startswith("process") else "ray"
    with serving(mode, "--engine-timeout", SILENCE, forked=True) as running:
        server = running.server
        for engines, death in enumerate(LIVES[life], 1):
            victim, old = find(server.process.pid, death.victim), with_model(server)
            (leader,) = {os.getsid(process.pid) for process in old}
            assert leader != os.getsid(server.process.pid)
            assert server.metrics()["quire_engine_starts_total"] == engines
            asyncio.run(_live_through(death, server, victim))
            assert [process for process in old if is_alive(process)] == session(leader) == []
            assert server.metrics()["quire_engine_starts_total"] == engines + 1
            server.wait_for_metric("quire_kv_pages_used", 0)
            assert len(list(running.place.iterdir())) == (1 if mode == "ray" else 0)


def with_model(server: RunningServer) -> list[psutil.Process]:
    """The processes below a server that belong to its engine: a fork server outlives engines."""
    return [process for process in tree(server.process.pid) if FORK_SERVER not in process.cmdline()]


@pytest.mark.slow
def test_engine_outlives_its_fork_server_and_is_replaced_when_it_dies() -> None:
    with serving("process") as running:
        server, victims = running.server, (FORK_SERVER, ENGINE["process"])
        for victim in [find(server.process.pid, name) for name in victims]:
            victim.kill()
            wait_until(lambda dead=victim: not is_alive(dead), "its end")
        server.wait_for_metric("quire_engine_starts_total", 2)
        assert {find(server.process.pid, name).ppid() for name in victims} == {server.process.pid}
        zombies = [p for p in psutil.Process(server.process.pid).children() if p.status() == psutil.STATUS_ZOMBIE]
        assert zombies == []


async def _live_through(death: Death, server: RunningServer, victim: psutil.Process) -> None:
    """Sends the signal under load; returns when the server serves again, with the tokens it gave before.

    Streams that ran have gone on, and have all tokens that were asked for.
    """
    async with aio.insecure_channel(server.address) as channel:
        stub, health = pb_grpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        before = await some_tokens(stub)
        watch = asyncio.create_task(statuses_of(health, 3))
        begun = server.metrics()[BEGUN]
        calls = [asyncio.create_task(call) for call in long_calls(stub)]
        await asyncio.to_thread(server.wait_for_metric, BEGUN, begun + REQUESTS)
        victim.send_signal(death.signal)
        async with asyncio.timeout(90):
            assert await watch == [SERVING, NOT_SERVING, SERVING]
            assert {code for codes in await asyncio.gather(*calls) for code in codes} == {grpc.StatusCode.OK}
        assert await some_tokens(stub) == before


# The end of a server.


@both_modes
def test_killed_server_takes_everything_with_it(mode: str) -> None:
    with serving(mode) as running, grpc.insecure_channel(running.server.address) as channel:
        process = running.server.process
        streams = [running.server.stub(channel).StreamGenerate(stream_request("A", 900, seed=i)) for i in range(16)]
        for stream in streams:
            next(stream)
        everything = tree(process.pid)
        assert len(everything) >= 1
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_alive, everything)), "the end of all processes", 20)


@both_modes
def test_drain_lets_streams_end_and_leaves_nothing(mode: str) -> None:
    """The engine works until its server has drained, whichever of the two is asked to stop."""
    with temporary_directory(), started_server(*FLAGS[mode]) as process:
        server = when_ready(process)
        everything, child = tree(process.pid), find(process.pid, HOST[mode])
        with grpc.insecure_channel(server.address) as channel:
            stream = server.stub(channel).StreamGenerate(stream_request("KING:", 1000, temperature=0))
            tokens = next(stream).deltas[0].token_count
            child.send_signal(signal.SIGINT)
            child.send_signal(signal.SIGTERM)
            os.killpg(process.pid, signal.SIGTERM)  # as a terminal and some supervisors do
            wait_until(lambda: check(channel) == NOT_SERVING, "the drain")
            assert tokens + sum(message.deltas[0].token_count for message in stream) == 1000
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in said
        assert [p for p in everything if is_alive(p)] == []


@both_modes
@pytest.mark.parametrize("moment", ["its child was started", "its engine loads"])
def test_server_that_still_starts_can_be_stopped(mode: str, moment: str) -> None:
    with temporary_directory(), started_server(*FLAGS[mode]) as process:
        child = find(process.pid, (FIRST if moment == "its child was started" else HOST)[mode])
        if moment == "its engine loads":
            engine = find(process.pid, "EngineActor") if mode == "ray" else child
            wait_until(lambda: has_loaded(engine.pid, "libtorch"), "torch loaded")
        everything = tree(process.pid)
        process.terminate()
        printed, said = process.communicate(timeout=60)
        assert process.returncode == 0
        # Where this process was held up, the server was ready by then.
        assert not printed or (moment == "its engine loads" and READY.fullmatch(printed.strip()))
        assert mode == "ray" or "Traceback" not in said  # Ray's own threads may say how they were interrupted
        assert [p for p in everything if is_alive(p)] == session(child.pid) == []


# A server that cannot start.

DAMAGED = "model.safetensors is no whole safetensors file"


@pytest.mark.parametrize(
    ("damaged", "reason", "modes"),
    [
        pytest.param(True, DAMAGED, ["process"], id="weights"),
        pytest.param(True, DAMAGED, list(FLAGS), id="weights, Ray too", marks=pytest.mark.slow),
        pytest.param(False, "Raise --kv-cache-memory", list(FLAGS), id="memory", marks=pytest.mark.slow),
    ],
)
def test_reasons_not_to_start_are_the_same_everywhere(
    tmp_path: Path, damaged: bool, reason: str, modes: list[str]
) -> None:
    flags = ["--kv-cache-memory", "10"]
    if damaged:
        broken = Path(shutil.copytree(demo_directory(), tmp_path / "model"))
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        flags = ["--model", str(broken)]
    engines = (("--engine", "thread"), *(FLAGS[mode] for mode in modes))
    with temporary_directory(), ThreadPoolExecutor() as pool:
        said = pool.map(lambda engine: serve_and_fail(*flags, *engine), engines)
        (message,) = {one.splitlines()[-1] for one in said}  # after what was logged before
    assert re.fullmatch(f"quire: .*{reason}.*", message)


def test_thread_and_ray_exclude_each_other() -> None:
    assert "--engine thread and --ray exclude each other" in serve_and_fail("--engine", "thread", "--ray")
