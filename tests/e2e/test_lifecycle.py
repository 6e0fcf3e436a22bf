"""A server process from its start to its end: what stops it from starting, health, draining."""

import concurrent.futures
import json
import shutil
import signal
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as pb

from rpc.paths import demo_directory
from tests.support.forking import run_quire
from tests.support.secrets import write
from tests.support.server import clean_environment, running_server, stream_request

SERVICE = "quire.v1.GenerationService"


def serve_and_fail(*flags: str) -> str:
    """Starts a server that must not start, and returns its standard error."""
    command = ["serve", "--port", "0", "--metrics-port", "0", "--admin-port", "0", *flags]
    done = run_quire(*command, env=clean_environment())
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout
    return done.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint to damage."""
    return Path(shutil.copytree(demo_directory(), tmp_path / "model"))


def test_damaged_checkpoints_stop_the_start_with_one_message(broken: Path) -> None:
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    assert "model.safetensors is no whole safetensors file" in serve_and_fail("--model", str(broken))
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9908624\n")
    assert "git-lfs pointer" in serve_and_fail("--model", str(broken))
    weights.write_bytes(whole)
    (broken / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in serve_and_fail("--model", str(broken))


def test_config_that_does_not_fit_the_weights_names_the_tensor(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 700}))
    message = serve_and_fail("--model", str(broken))
    assert "model.layers.0.mlp.gate_proj.weight in model.safetensors has shape [704, 256]" in message
    assert "needs [700, 256]" in message
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    assert "model.layers.6.input_layernorm.weight is missing" in serve_and_fail("--model", str(broken))
    (broken / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    assert "'quantization_config' is set" in serve_and_fail("--model", str(broken))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere"], "--model /nowhere: no such directory"),
        (["--host", "0.0.0.0"], "without TLS"),  # noqa: S104 - that it is refused is the test
        (["--token-file", "/nowhere"], "/nowhere"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-client-ca", "ca.pem"], "--tls-client-ca is for TLS"),
        (["--page-size", "0"], "--page-size is 0"),
        (["--kv-cache-memory", "10"], "Raise --kv-cache-memory"),
        (["--max-batched-tokens", "8"], "--max-batched-tokens is 8"),
        (["--dtype", "int4"], "--dtype is 'int4'"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
@pytest.mark.sample(3)
def test_flags_that_cannot_be_met_are_named(flags: list[str], message: str) -> None:
    if "cuda" in flags and shutil.which("nvidia-smi"):
        pytest.skip("this machine has a CUDA device")
    assert message in serve_and_fail(*flags)


@pytest.mark.parametrize("flag", ["--port", "--join-address"])
def test_a_port_in_use_is_reported_in_one_line_before_the_model_is_loaded(broken: Path, flag: str) -> None:
    (broken / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9908624\n"
    )
    token = write(broken / "token", b"t" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        join = flag == "--join-address"
        flags = (f"127.0.0.1:{port}", "--join-token-file", token) if join else (port,)
        said = serve_and_fail("--model", str(broken), flag, *flags)
    assert said.startswith(f"quire: {flag} {port} on 127.0.0.1 cannot be opened: Address already in use")
    assert said.count("\n") == 1


def check(channel: grpc.Channel, service: str = "") -> int:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status


def test_drain_lets_streams_end_and_refuses_new_ones() -> None:
    with running_server() as server, grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        other = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == next(other).status == health_pb2.HealthCheckResponse.SERVING
        other.cancel()
        assert check(channel) == check(channel, SERVICE) == health_pb2.HealthCheckResponse.SERVING
        # Long enough to be going on yet when the next call arrives, also on a busy machine.
        streams = [server.stub(channel).StreamGenerate(stream_request("KING:", 1000, temperature=0)) for _ in range(8)]
        firsts = [next(stream) for stream in streams]
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            server.stub(channel).Generate(pb.GenerateRequest(spec=stream_request("A", 1).spec))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in refused.value.details()
        for first, stream in zip(firsts, streams, strict=True):
            assert sum(message.deltas[0].token_count for message in (first, *stream)) == 1000
        assert server.process.wait(60) == 0


def test_drain_is_bounded_and_a_second_signal_ends_it() -> None:
    for flags, signals in ((["--drain-time", "0.5"], 1), ([], 2)):
        with running_server(*flags) as server, grpc.insecure_channel(server.address) as channel:
            streams = [server.stub(channel).StreamGenerate(stream_request("K", 1000, temperature=1)) for _ in range(8)]
            for stream in streams:
                next(stream)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            server.process.send_signal(signal.SIGTERM)
            while next(watch).status == health_pb2.HealthCheckResponse.SERVING:
                pass
            if signals == 2:  # sent once the first was seen: equal signals that are pending count as one
                server.process.send_signal(signal.SIGINT)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                codes = set(pool.map(_end_of, streams))
            assert codes == {grpc.StatusCode.UNAVAILABLE}
            assert server.process.wait(60) == 0


def _end_of(stream: grpc.Call) -> grpc.StatusCode:
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        pass
    return stream.code()


def test_unknown_health_service_and_reflection_behind_its_flag() -> None:
    with running_server() as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as unknown:
            check(channel, "nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
        assert grpc.StatusCode.UNIMPLEMENTED in _reflected(channel)
    with running_server("--reflection") as server, grpc.insecure_channel(server.address) as channel:
        assert SERVICE in _reflected(channel)


def _reflected(channel: grpc.Channel) -> list[object]:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    request = reflection_pb2.ServerReflectionRequest(list_services="")
    try:
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        return [service.name for answer in answers for service in answer.list_services_response.service]
    except grpc.RpcError as error:
        return [error.code()]
