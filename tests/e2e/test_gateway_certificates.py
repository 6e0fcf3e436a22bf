"""A gateway's own certificate: replaced while it serves, and refused at its start where it is not as it should be."""

import fcntl
import os
import ssl
import subprocess
import termios
import time
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.support.forking import QUIRE, run_quire
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.secrets import write
from tests.support.server import clean_environment

NOBODY = "127.0.0.1:1"  # a server: none is needed to shake hands
SECONDS = 30


class Pair:
    """A certificate of 127.0.0.1 and its key, in files. authority: signed it."""

    def __init__(self, directory: Path) -> None:
        self.chain, self.key = directory / "cert.pem", directory / "key.pem"
        self.renew()

    def renew(self) -> None:
        self.authority = trustme.CA()
        made = self.authority.issue_cert("127.0.0.1")
        self.chain_pem, self.key_pem = made.cert_chain_pems[0].bytes(), made.private_key_pem.bytes()

    def write(self) -> list[str]:
        return ["--tls-cert", write(self.chain, self.chain_pem), "--tls-key", write(self.key, self.key_pem)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def connect(gateway: RunningGateway, authority: trustme.CA) -> ssl.SSLSocket:
    """Raises SSLError where another one signed its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # a default one reads all that this machine trusts: 15 ms a look
    authority.configure_trust(context)
    opened = gateway.connect()
    try:
        return context.wrap_socket(opened, server_hostname="127.0.0.1")
    except ssl.SSLError:
        opened.close()
        raise


FIRST, REST = b"GET /v1/nothing HTTP/1.1\r\n", b"host: a\r\n\r\n"  # of a request


def answers(opened: ssl.SSLSocket, request: bytes = FIRST + REST) -> bool:
    opened.sendall(request)
    return opened.recv(4096).startswith(b"HTTP/1.1 404 ")


def wait_for(gateway: RunningGateway, authority: trustme.CA) -> None:
    """Until new connections get a certificate of its signing."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with connect(gateway, authority) as opened:
                assert answers(opened)
                return
        except ssl.SSLCertVerificationError:
            assert time.monotonic() < deadline


def test_new_connections_get_the_certificate_that_the_files_hold_by_then(pair: Pair) -> None:
    with running_gateway([NOBODY], *pair.write()) as gateway, connect(gateway, pair.authority) as before:
        before.sendall(FIRST)
        old = pair.authority
        pair.renew()
        pair.write()
        wait_for(gateway, pair.authority)
        assert answers(before, REST), "connections that are there go on"
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(gateway, old)
        with connect(gateway, pair.authority) as opened:
            assert opened.version() == "TLSv1.3"
        context = ssl.create_default_context()
        pair.authority.configure_trust(context)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with context.wrap_socket(gateway.connect(), server_hostname="127.0.0.1") as chosen:
            assert chosen.selected_alpn_protocol() == "http/1.1"


@pytest.mark.parametrize("broken", ["another key", "no key", "gone", "everybody's"])
@pytest.mark.slow
def test_the_last_good_pair_stays_where_a_new_one_is_broken(pair: Pair, tmp_path: Path, broken: str) -> None:
    log = tmp_path / "log"
    with log.open("w") as file, running_gateway([NOBODY], *pair.write(), stderr=file) as gateway:
        good = pair.authority
        pair.renew()
        write(pair.chain, pair.chain_pem)  # the first half of what is replaced one after the other
        if broken == "no key":
            write(pair.key, b"nonsense")
        elif broken == "gone":
            pair.key.unlink()
        elif broken == "everybody's":
            write(pair.key, pair.key_pem)
            pair.key.chmod(0o644)
        deadline = time.monotonic() + SECONDS
        while "what was read before stays in force" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            try:
                with connect(gateway, good) as opened:
                    assert answers(opened)
            except ssl.SSLCertVerificationError:
                pytest.fail("a pair that is broken is in force")
        assert str(pair.key if broken != "gone" else pair.chain) in log.read_text()
        with connect(gateway, good) as opened:
            assert answers(opened)
        pair.write()
        wait_for(gateway, pair.authority)
        assert f"read anew: {pair.chain}, {pair.key}" in log.read_text()
        assert "Traceback" not in log.read_text()


def refusal(*flags: str) -> str:
    done = run_quire("gateway", "--server", NOBODY, "--port", "0", *flags, timeout=SECONDS, env=clean_environment())
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
@pytest.mark.parametrize("flags", ["--tls", "--server"])
def test_a_key_that_everybody_can_use_is_refused(pair: Pair, mode: int, flags: str) -> None:
    pair.write()
    pair.key.chmod(mode)
    said = refusal(f"{flags}-cert", str(pair.chain), f"{flags}-key", str(pair.key))
    assert said == f"quire: {flags}-key {pair.key} can be used by every user of this machine: chmod o= {pair.key}"


def test_a_key_in_the_file_of_its_certificate_is_guarded_too(pair: Pair) -> None:
    write(pair.chain, pair.chain_pem + pair.key_pem)
    with running_gateway([NOBODY], "--tls-cert", str(pair.chain)) as gateway:
        wait_for(gateway, pair.authority)
    pair.chain.chmod(0o644)
    said = refusal("--tls-cert", str(pair.chain))
    assert f"--tls-cert {pair.chain} can be used by every user of this machine: chmod o= {pair.chain}" in said


@pytest.mark.parametrize("flags", ["--tls", "--server"])
def test_nobody_is_asked_for_the_password_of_a_key(pair: Pair, flags: str) -> None:
    pair.write()
    key = load_pem_private_key(pair.key_pem, None)
    write(pair.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    person, terminal = os.openpty()
    try:
        done = subprocess.run(
            [QUIRE, "gateway", "--server", NOBODY, "--port", "0",
             f"{flags}-cert", str(pair.chain), f"{flags}-key", str(pair.key)],
            stdin=terminal, capture_output=True, text=True, timeout=SECONDS, env=clean_environment(),
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.set_blocking(person, False)
        with pytest.raises(BlockingIOError):
            os.read(person, 1)
    finally:
        os.close(person)
        os.close(terminal)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"quire: {flags}-key {pair.key} is encrypted, and a server cannot ask for its password\n"


def test_a_pair_that_is_none_is_refused(pair: Pair) -> None:
    pair.write()
    pair.renew()
    write(pair.key, pair.key_pem)
    for flags in ("--tls", "--server"):
        given = f"{flags}-cert", str(pair.chain), f"{flags}-key", str(pair.key)
        assert f"{given[0]} {given[1]} and {given[2]} {given[3]} are no certificate and its key" in refusal(*given)
    write(pair.chain, b"nonsense")
    assert f"--server-ca {pair.chain} has no certificate" in refusal("--server-ca", str(pair.chain))
    assert "--tls-cert x with its key cannot be read: " in refusal("--tls-cert", "x")
    assert "--server-ca x cannot be read: " in refusal("--server-ca", "x")


def test_a_handshake_that_never_ends_is_cut_off(pair: Pair) -> None:
    with (
        running_gateway([NOBODY], *pair.write(), "--read-time", "0.5") as gateway,
        gateway.connect() as silent,
    ):
        silent.settimeout(SECONDS)
        assert silent.recv(1) == b""
