"""A server's address that is none is refused at once, by every command that takes one and by the clients."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rpc.addresses import check_server
from rpc.cli.main import app
from rpc.client import AsyncClient, Client

COMMANDS = (
    ("generate", "ROMEO:"),
    ("chat",),
    ("models",),
    ("top", "--once"),
    ("admin", "requests"),
    ("cluster", "status"),
    ("batch", "--input", "in", "--output", "out"),
    ("bench", "serve"),
    ("gateway", "--port", "0"),
)
WORDS = "the server's address is '{}', must be HOST:PORT, such as 127.0.0.1:50051"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("address", ["foo", "http://127.0.0.1:50051"])
def test_every_command_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(json.dumps({"prompt": "A"}))
    done = CliRunner().invoke(app, [*command, "--server", address], input="hello\n")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"quire: {WORDS.format(address)}\n")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "address",
    ["", "foo", ":50051", "foo:", "foo:0", "foo:65536", "foo:http", "http://foo:1", "foo:1/", "::1:1", "[:1", "a b:1"],
)
def test_clients_raise_the_same_words(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT") as error:
        Client(["127.0.0.1:1", address])
    assert str(error.value) == WORDS.format(address)

    async def make() -> None:
        AsyncClient(address)

    with pytest.raises(ValueError, match="must be HOST:PORT"):
        asyncio.run(make())


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.4:65535", "[::1]:50051", "[fe80::1%eth0]:1", "a-b.c_d:80"])
def test_addresses_that_can_be_called_are_taken(address: str) -> None:
    """Both raise ValueError for others, as the tests above show."""
    check_server(address)
    Client(address).close()
