"""A gateway and servers that ask for TLS, tokens and certificates, and OpenAI's client in front of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import trustme

from tests.support.gateway import RunningGateway, running_gateway
from tests.support.secrets import write
from tests.support.server import RunningServer, quire, running_server

ANN = "ann-" + "a" * 20
EVERYWHERE = "0.0.0.0"  # noqa: S104 - refused


@dataclass
class Files:
    """authority: signs certificates of servers and of the gateway. stranger: signs certificates that no side trusts."""

    directory: Path
    authority: trustme.CA
    stranger: trustme.CA

    def ca(self, signer: trustme.CA, name: str = "ca.pem") -> str:
        return write(self.directory / name, signer.cert_pem.bytes())

    def pair(self, signer: trustme.CA, name: str, host: str = "127.0.0.1") -> tuple[str, str]:
        made = signer.issue_cert(host)
        chain, key = made.cert_chain_pems[0].bytes(), made.private_key_pem.bytes()
        return write(self.directory / f"{name}.pem", chain), write(self.directory / f"{name}.key", key)

    def server(self) -> list[str]:
        chain, key = self.pair(self.authority, "server")
        tokens = write(self.directory / "tokens", f"ann {ANN}\n".encode())
        return ["--tls-cert", chain, "--tls-key", key, "--token-file", tokens]

    def gateway(self, *flags: str) -> list[str]:
        return ["--server-ca", self.ca(self.authority), *flags]

    def own(self, signer: trustme.CA) -> list[str]:
        """The gateway's own certificate, which it shows to servers."""
        chain, key = self.pair(signer, "gateway", "gateway.example")
        return ["--server-cert", chain, "--server-key", key]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("secrets"), trustme.CA(), trustme.CA())


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[RunningServer]:
    with running_server(*files.server()) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[RunningServer]:
    with running_server(*files.server(), "--tls-client-ca", files.ca(files.authority, "clients.pem")) as running:
        yield running


def completed(gateway: RunningGateway, token: str = ANN) -> str:
    with gateway.client(api_key=token) as client:
        return client.completions.create(model="quire-demo", prompt="ROMEO:", max_tokens=4, seed=1).choices[0].text


def streamed(gateway: RunningGateway, token: str = ANN) -> str:
    with gateway.client(api_key=token) as client:
        chunks = client.completions.create(model="quire-demo", prompt="ROMEO:", max_tokens=4, seed=1, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def models(gateway: RunningGateway, token: str = ANN) -> str:
    with gateway.client(api_key=token) as client:
        return client.models.list().data[0].id


def test_a_tenants_key_is_its_token(files: Files, server: RunningServer) -> None:
    with running_gateway([server.address], *files.gateway()) as gateway:
        assert completed(gateway) == streamed(gateway) != ""
        assert models(gateway) == "quire-demo"
        for wrong in ("x" * 40, ANN[:-1]):
            for ask in (completed, streamed, models):
                with pytest.raises(openai.AuthenticationError) as refused:
                    ask(gateway, wrong)
                assert (refused.value.status_code, refused.value.code) == (401, "no_token")
                assert refused.value.response.headers["www-authenticate"] == "Bearer"
                assert wrong not in refused.value.message
        status, _, said = gateway.answer("/v1/completions", {"prompt": "A", "max_tokens": 1})
        assert (status, said["error"]["type"]) == (401, "authentication_error")


def lost(gateway: RunningGateway, ask: Callable[[RunningGateway], str]) -> None:
    """The client learns that no server answers, and nothing of the house behind."""
    with pytest.raises(openai.InternalServerError) as raised:
        ask(gateway)
    assert raised.value.status_code == 503
    assert raised.value.body == {
        "message": "no server answers", "type": "server_error", "param": None, "code": "unavailable"
    }  # fmt: skip


def test_a_server_whose_certificate_somebody_else_signed(files: Files, server: RunningServer, tmp_path: Path) -> None:
    flags = "--server-ca", files.ca(files.stranger, "stranger.pem")
    log = tmp_path / "log"
    with log.open("w") as file, running_gateway([server.address], *flags, stderr=file) as gateway:
        for ask in (completed, streamed, models):
            lost(gateway, ask)
        assert gateway.health() == (503, None)
    told = [line for line in log.read_text().splitlines() if line.startswith("quire: ")]
    assert len(told) == 1, told
    assert told[0].startswith(f"quire: server {server.address} does not answer: ")
    assert "CERTIFICATE_VERIFY_FAILED" in told[0]


def test_a_gateway_for_others_says_at_its_start_that_it_does_not_trust_the_server(
    files: Files, server: RunningServer
) -> None:
    chain, key = files.pair(files.authority, "front")
    flags = ["--host", EVERYWHERE, "--tls-cert", chain, "--tls-key", key]
    ca = files.ca(files.stranger, "stranger.pem")
    done = quire("gateway", "--server", server.address, "--port", "0", *flags, "--server-ca", ca)
    assert done.returncode == 1
    assert "whether its servers ask for a token is not known: UNAVAILABLE: " in done.stderr
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_tls_towards_a_server_that_has_it(server: RunningServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file, running_gateway([server.address], stderr=file) as gateway:
        lost(gateway, models)
    assert f"server {server.address} does not answer: " in log.read_text()


def test_a_server_asks_for_the_gateways_certificate_and_its_clients_tokens(files: Files, mutual: RunningServer) -> None:
    with running_gateway([mutual.address], *files.gateway(*files.own(files.authority))) as gateway:
        assert gateway.health() == (200, None)
        assert completed(gateway) == streamed(gateway) != ""
        with pytest.raises(openai.AuthenticationError):
            completed(gateway, "x" * 40)


@pytest.mark.parametrize("shown", ["nothing", "what somebody else signed"])
def test_a_gateway_without_the_right_certificate(
    files: Files, mutual: RunningServer, tmp_path: Path, shown: str
) -> None:
    own = [] if shown == "nothing" else files.own(files.stranger)
    log = tmp_path / "log"
    with log.open("w") as file, running_gateway([mutual.address], *files.gateway(*own), stderr=file) as gateway:
        for ask in (completed, models):
            lost(gateway, ask)
        assert gateway.health() == (503, None)
    (told,) = (line for line in log.read_text().splitlines() if line.startswith("quire: "))
    assert told.startswith(f"quire: server {mutual.address} does not answer: ")


def test_the_next_server_goes_on_where_one_is_not_trusted(files: Files, server: RunningServer, tmp_path: Path) -> None:
    chain, key = files.pair(files.stranger, "untrusted")
    log = tmp_path / "log"
    with (
        running_server("--tls-cert", chain, "--tls-key", key) as untrusted,
        log.open("w") as file,
        running_gateway([untrusted.address, server.address], *files.gateway(), stderr=file) as gateway,
    ):
        assert completed(gateway) == streamed(gateway) != ""
    told = [line for line in log.read_text().splitlines() if line.startswith("quire: ")]
    assert len(told) == 1, told
    assert f"server {untrusted.address} does not answer: " in told[0]
    assert "CERTIFICATE_VERIFY_FAILED" in told[0]
