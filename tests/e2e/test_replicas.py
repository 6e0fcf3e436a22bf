"""Several engines behind one server: streams outlive engines, restarts and drains, with the tokens they would get."""

import json
import random
import signal
import subprocess
from collections.abc import Iterator

import grpc
import psutil
import pytest
from quire.v1 import admin_service_pb2 as pb
from quire.v1 import admin_service_pb2_grpc as pb_grpc
from quire.v1 import generation_service_pb2 as generation_pb

from tests.support.forking import run_quire
from tests.support.processes import tree, wait_until
from tests.support.server import RunningServer, running_server, stream_request
from tests.support.watching_client import histories_of, outputs_of, until_running, watching

REPLICAS, STREAMS, TOKENS = 3, 8, 400
ENGINE = "rpc.engines.engine_process"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--replicas", str(REPLICAS), "--kv-cache-memory", "64MiB") as running:
        yield running


def client(server: RunningServer) -> subprocess.Popen:
    return watching(server.address, STREAMS, TOKENS)


def told_by(process: subprocess.Popen) -> list[dict]:
    return histories_of(process, STREAMS)


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[dict]:
    """Results of undisturbed streams."""
    process = client(server)
    until_running(process)
    return outputs_of(told_by(process))


def engines(server: RunningServer) -> list[psutil.Process]:
    return [process for process in tree(server.process.pid) if ENGINE in process.cmdline()]


def all_serve(server: RunningServer) -> bool:
    with grpc.insecure_channel(server.admin) as channel:
        replicas = pb_grpc.AdminServiceStub(channel).ListReplicas(pb.ListReplicasRequest()).replicas
        return [replica.state for replica in replicas] == [pb.REPLICA_STATE_SERVING] * REPLICAS


def test_requests_go_to_all_replicas(server: RunningServer) -> None:
    before = server.metrics()
    process = watching(server.address, STREAMS, 900)  # many, so that all run when it is looked, and cut off then
    until_running(process)
    with grpc.insecure_channel(server.admin) as channel:
        replicas = pb_grpc.AdminServiceStub(channel).ListReplicas(pb.ListReplicasRequest()).replicas
    assert sum(replica.request_count for replica in replicas) <= STREAMS
    assert all(replica.request_count for replica in replicas)
    process.kill()
    process.communicate()
    server.wait_for_metric("quire_num_requests_running", 0)
    assert server.metrics()["quire_engine_starts_total"] == before["quire_engine_starts_total"] == REPLICAS


def test_requests_that_start_alike_go_to_the_same_replica(server: RunningServer) -> None:
    """Each of these would have a chance of one in three to find what the first one left."""
    rng = random.Random(1)
    with grpc.insecure_channel(server.address) as channel:
        stub = server.stub(channel)
        for _ in range(8):
            prompt = [rng.randrange(10, 1000) for _ in range(200)]
            found = []
            for more in range(3):
                spec = stream_request([*prompt, more], 2).spec
                usage = stub.Generate(generation_pb.GenerateRequest(spec=spec)).usage
                found.append(usage.cached_prompt_tokens)
            assert found == [0, 192, 192]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_streams_of_a_lost_engine_go_on(server: RunningServer, expected: list[dict], how: int) -> None:
    wait_until(lambda: all_serve(server), "all replicas")
    process = client(server)
    until_running(process)
    victim = engines(server)[1]
    victim.send_signal(how)
    assert outputs_of(told_by(process)) == expected
    wait_until(lambda: all_serve(server), "all replicas")
    wait_until(lambda: not victim.is_running(), "the end of the engine that was lost")


def test_a_rolling_restart_fails_no_request(server: RunningServer, expected: list[dict]) -> None:
    wait_until(lambda: all_serve(server), "all replicas")
    old = {process.pid for process in engines(server)}
    process = client(server)
    until_running(process)
    for number in range(REPLICAS):
        said = run_quire("admin", "restart", str(number), "--server", server.admin)
        assert (said.returncode, f"replica {number} is new" in said.stdout) == (0, True)
    assert outputs_of(told_by(process)) == expected
    assert not old & {process.pid for process in engines(server)}


def test_a_drained_replica_gets_nothing_until_it_is_resumed(server: RunningServer, expected: list[dict]) -> None:
    def admin(*command: str) -> str:
        done = run_quire("admin", *command, "--server", server.admin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    process = client(server)
    until_running(process)
    assert "go on elsewhere; replica 2 gets no new ones" in admin("drain", "2")
    shown = run_quire("cluster", "status", "--json", "--server", server.admin)
    assert shown.returncode == 0, shown.stderr
    state = json.loads(shown.stdout)["replicas"][2]
    admin("resume", "2")
    assert (state["state"], state["request_count"]) == ("REPLICA_STATE_DRAINED", 0)
    assert outputs_of(told_by(process)) == expected
    assert all_serve(server)


def test_the_last_replica_is_not_drained(server: RunningServer) -> None:
    with grpc.insecure_channel(server.admin) as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        wait_until(lambda: all_serve(server), "all replicas")
        for number in (0, 1):
            stub.DrainReplica(pb.DrainReplicaRequest(replica=number))
        with pytest.raises(grpc.RpcError) as refused:
            stub.DrainReplica(pb.DrainReplicaRequest(replica=2))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.RpcError) as refused:
            stub.RestartReplica(pb.RestartReplicaRequest(replica=7))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        for number in (0, 1):
            stub.ResumeReplica(pb.ResumeReplicaRequest(replica=number))
    assert all_serve(server)


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_nothing(server: RunningServer, expected: list[dict]) -> None:
    """Each is followed by another one's restart at times, as operators do when something is wrong."""
    chance = random.Random(7)
    for _ in range(2):
        wait_until(lambda: all_serve(server), "all replicas")
        process = client(server)
        until_running(process)
        for victim in chance.sample(engines(server), chance.randint(1, 2)):
            victim.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]))
        assert outputs_of(told_by(process)) == expected


@pytest.mark.slow
def test_a_second_engine_comes_with_the_work_and_goes_after_it() -> None:
    """While streams run, which notice neither."""
    flags = ["--max-replicas", "2", "--scale-use", "0.05", "--scale-up-delay", "0", "--scale-down-delay", "3"]
    with running_server("--kv-cache-memory", "64MiB", *flags) as server:
        while server.metrics()["quire_replicas"] < 2:
            process = client(server)
            until_running(process)
            told_by(process)
        assert server.metrics()["quire_replicas_wanted"] == 2
        server.wait_for_metric("quire_replicas", 1)
        wait_until(lambda: len(engines(server)) == 1, "the end of its process, which was told to stop")
        assert server.metrics()["quire_engine_starts_total"] == 2
