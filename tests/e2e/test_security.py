"""A server that asks for tokens and TLS, and clients that have them or not."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_pb_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.client import AccessError, AsyncClient, Client, Security
from tests.support.secrets import write
from tests.support.server import RunningServer, details, quire, running_server, stream_request

ANN, BOB, OPS = "ann-" + "a" * 20, "bob-" + "b" * 20, "ops-" + "o" * 20
PROMPT = list(range(5, 5 + 64))


@dataclass
class Files:
    """A server's secrets. authority: signs its certificate. clients: sign those of clients."""

    directory: Path
    authority: trustme.CA
    clients: trustme.CA

    def write(self) -> list[str]:
        made = self.authority.issue_cert("localhost")
        chain = b"".join(part.bytes() for part in made.cert_chain_pems)
        lines = f"ann {ANN}\nbob {BOB}\nops {OPS} operator\n"
        return [
            "--tls-cert", write(self.directory / "cert.pem", chain),
            "--tls-key", write(self.directory / "key.pem", made.private_key_pem.bytes()),
            "--tls-client-ca", write(self.directory / "clients.pem", self.clients.cert_pem.bytes()),
            "--token-file", write(self.directory / "tokens", lines.encode()),
        ]  # fmt: skip

    def credentials(self, signed_by: trustme.CA | None) -> grpc.ChannelCredentials:
        roots = self.authority.cert_pem.bytes()
        if signed_by is None:
            return grpc.ssl_channel_credentials(roots)
        own = signed_by.issue_cert("client.example")
        return grpc.ssl_channel_credentials(roots, own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("secrets"), trustme.CA(), trustme.CA())


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[RunningServer]:
    with running_server(*files.write()) as running:
        yield running


def channel(server: RunningServer, credentials: grpc.ChannelCredentials) -> grpc.Channel:
    own_connection = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "localhost")]
    return grpc.secure_channel(server.address, credentials, options=own_connection)


@pytest.fixture
def let_in(files: Files, server: RunningServer) -> Iterator[pb_grpc.GenerationServiceStub]:
    with channel(server, files.credentials(files.clients)) as connected:
        yield pb_grpc.GenerationServiceStub(connected)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def ask(stub: pb_grpc.GenerationServiceStub, token: str, request_id: str = "") -> pb.GenerateResponse:
    spec = stream_request(PROMPT, 2, temperature=0).spec
    return stub.Generate(pb.GenerateRequest(spec=spec, request_id=request_id), metadata=bearer(token), timeout=60)


def test_a_tenant_gets_its_own_pages_and_nobody_elses(let_in: pb_grpc.GenerationServiceStub) -> None:
    first = ask(let_in, ANN)
    again, other = ask(let_in, ANN), ask(let_in, BOB)
    assert first.prompt_info.cached_token_count == 0
    assert again.prompt_info.cached_token_count > 0
    assert other.prompt_info.cached_token_count == 0, "the time to the first token does not show what other tenants ask"
    assert first.sequences[0].token_ids == again.sequences[0].token_ids == other.sequences[0].token_ids


def test_request_ids_of_tenants_do_not_meet(let_in: pb_grpc.GenerationServiceStub, server: RunningServer) -> None:
    cancelled = "quire_requests_total{cancelled}"
    before = server.metrics()[cancelled]
    request = stream_request("x", 600)
    request.request_id = "mine"
    call = let_in.StreamGenerate(request, metadata=bearer(ANN), timeout=60)
    next(call)
    assert ask(let_in, BOB, "mine").request_id == "mine"
    with pytest.raises(grpc.RpcError) as raised:
        ask(let_in, ANN, "mine")
    assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    server.wait_for_metric(cancelled, before + 1)  # the next tests compare counts


@pytest.mark.parametrize("token", ["", ANN[:-1], "x" * 40])
def test_without_a_token_nothing_is_done(
    let_in: pb_grpc.GenerationServiceStub, server: RunningServer, token: str
) -> None:
    before = server.metrics()
    for call in (
        lambda: ask(let_in, token),
        lambda: list(let_in.StreamGenerate(stream_request("x", 5), metadata=bearer(token), timeout=60)),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert details(raised.value)["ErrorInfo"].reason == "NO_TOKEN"
        assert token not in (raised.value.details() or "") or not token
    denied = 'quire_calls_denied_total{reason="no_token"}'
    after = server.metrics()
    assert after[denied] == before[denied] + 2
    assert {k: v for k, v in after.items() if "requests_total" in k} == {
        k: v for k, v in before.items() if "requests_total" in k
    }


def test_a_probe_needs_a_certificate_but_no_token(files: Files, server: RunningServer) -> None:
    with channel(server, files.credentials(files.clients)) as connected:
        stub = health_pb2_grpc.HealthStub(connected)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="quire.v1.GenerationService"), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("kind", ["no certificate", "one signed by somebody else", "no TLS"])
def test_strangers_do_not_get_through_the_handshake(files: Files, server: RunningServer, kind: str) -> None:
    stranger = None if kind == "no certificate" else trustme.CA()
    connected = (
        grpc.insecure_channel(server.address) if kind == "no TLS" else channel(server, files.credentials(stranger))
    )
    with connected, pytest.raises(grpc.RpcError) as raised:
        ask(pb_grpc.GenerationServiceStub(connected), ANN)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_operators_alone_use_the_admin_port(server: RunningServer) -> None:
    with grpc.insecure_channel(server.admin) as connected:
        stub = admin_pb_grpc.AdminServiceStub(connected)
        for token, code in (("", "UNAUTHENTICATED"), (ANN, "PERMISSION_DENIED")):
            with pytest.raises(grpc.RpcError) as raised:
                stub.ResetPrefixCache(admin_pb.ResetPrefixCacheRequest(), metadata=bearer(token), timeout=60)
            assert raised.value.code().name == code
        assert stub.ListReplicas(admin_pb.ListReplicasRequest(), metadata=bearer(OPS), timeout=60).replicas


def test_clients_and_commands_show_tokens_and_certificates(files: Files, server: RunningServer, tmp_path: Path) -> None:
    own = files.clients.issue_cert("client.example")
    roots, key, chain = files.authority.cert_pem.bytes(), own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()
    address = server.address.replace("127.0.0.1", "localhost")
    security = Security(ANN, roots=roots, chain=chain, key=key)
    with Client(address, security, timeout=60) as client:
        expected = client.generate("ROMEO:", temperature=0, max_tokens=5).sequences[0].text
    with Client(address, replace(security, token="x" * 40), timeout=60) as client, pytest.raises(AccessError):
        client.models()

    async def with_asyncio() -> str:
        async with AsyncClient(address, security, timeout=60) as client:
            return (await client.generate("ROMEO:", temperature=0, max_tokens=5)).sequences[0].text

    assert asyncio.run(with_asyncio()) == expected
    flags = [
        "--tls-ca", write(tmp_path / "ca", roots), "--tls-cert", write(tmp_path / "cert", chain),
        "--tls-key", write(tmp_path / "key", key), "--token-file", write(tmp_path / "token", ANN.encode()),
    ]  # fmt: skip
    asked = ["ROMEO:", "--temperature", "0", "--max-tokens", "5", "-q"]
    assert quire("generate", *asked, "--server", address, *flags).stdout == expected + "\n"
    assert quire("models", "--server", address, *flags).stdout == server.model + "\n"
    operator = write(tmp_path / "operator", OPS.encode())
    assert "serving" in quire("cluster", "status", "--server", server.admin, "--token-file", operator).stdout
    refused = quire("admin", "page-map", "--server", server.admin, "--token-file", flags[-1])
    assert refused.returncode == 1
    assert "PERMISSION_DENIED: the token is not an operator's" in refused.stderr
    (tmp_path / "in.jsonl").write_text(
        '{"id": "1", "prompt": "ROMEO:", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 5}}\n'
    )
    job = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    done = quire("batch", *job, "--server", address, *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == expected


def test_certificates_and_tokens_are_replaced_while_it_serves(files: Files, server: RunningServer) -> None:
    """The last test of this server: its secrets are others afterwards."""
    with channel(server, files.credentials(files.clients)) as before:
        old_stub = pb_grpc.GenerationServiceStub(before)
        ask(old_stub, ANN)
        new = Files(files.directory, trustme.CA(), trustme.CA())
        new.write()
        write(files.directory / "tokens", f"ann {ANN}-new\n".encode())
        deadline = time.monotonic() + 60
        while True:
            with channel(server, new.credentials(new.clients)) as connected:
                try:
                    ask(pb_grpc.GenerationServiceStub(connected), ANN + "-new")
                    break
                except grpc.RpcError:
                    if time.monotonic() > deadline:
                        raise
        with pytest.raises(grpc.RpcError) as raised:
            ask(old_stub, ANN)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED, "the connection lives, the token does not"
        ask(old_stub, ANN + "-new")
    with channel(server, files.credentials(files.clients)) as connected, pytest.raises(grpc.RpcError) as raised:
        ask(pb_grpc.GenerationServiceStub(connected), ANN + "-new")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE, "the old authority's word counts no more"
