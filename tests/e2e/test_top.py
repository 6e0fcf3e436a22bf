"""`quire top` in a real terminal, beside a server with work."""

import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rpc.client import Client, Security
from tests.support.server import QUIRE, RunningServer, clean_environment, running_server
from tests.support.terminal import running_terminal

OPERATOR = "the-operator-of-this-test"
PROMPT = "First Citizen: we are accounted poor citizens, the patricians good. " * 4


@contextmanager
def load(server: RunningServer, streams: int = 6) -> Iterator[None]:
    """Keeps `streams` requests running, each followed by the next."""
    over = False

    def ask(number: int) -> None:
        while not over:
            client.generate(f"{number} {PROMPT}", max_tokens=150, ignore_eos=True)

    with Client(server.address, Security(OPERATOR)) as client, ThreadPoolExecutor(streams) as pool:
        asking = [pool.submit(ask, number) for number in range(streams)]
        try:
            yield
        finally:
            over = True
            for one in asking:
                one.result()


def once(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [QUIRE, "top", *flags]
    environment = clean_environment() | {"COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by name: the server's tokens, the operator's own and one that is wrong."""
    directory, paths = tmp_path_factory.mktemp("tokens"), {}
    for name, text in (("tokens", f"ops {OPERATOR} operator\n"), ("own", OPERATOR), ("wrong", OPERATOR + "x")):
        path = directory / name
        path.touch(0o600)
        path.write_text(text)
        paths[name] = str(path)
    return paths


@pytest.fixture(scope="module")
def server(files: dict[str, str]) -> Iterator[RunningServer]:
    with running_server("--replicas", "2", "--kv-cache-memory", "8MiB", "--token-file", files["tokens"]) as running:
        yield running


@pytest.mark.slow
def test_a_picture_of_a_server_with_work(server: RunningServer, files: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    with load(server):
        while True:
            done = once("--server", server.admin, "--interval", "0.5", "--token-file", files["own"])
            assert done.returncode == 0, done.stderr
            if re.search(r"[0-9a-f]{20}.* ops +running +[01] ", done.stdout):
                break
            assert time.monotonic() < deadline, done.stdout  # all that a picture has may not have begun
    rate = re.search(r"generated +([\d,]+) tokens/s", done.stdout)
    assert rate is not None
    assert int(rate[1].replace(",", "")) > 0
    held = [int(count) for count in re.findall(r"(\d+) held, \d+ cached of 170", done.stdout)]
    assert len(held) == 2
    assert sum(held) > 0
    assert done.stdout.count("KV pages of engine") == 2
    assert "█" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_live_until_ctrl_c(server: RunningServer, files: dict[str, str]) -> None:
    command = [QUIRE, "top", "--server", server.admin, "--interval", "0.2", "--token-file", files["own"]]
    with running_terminal(command) as terminal:
        terminal.wait_for("2 engines")
        with load(server):
            terminal.wait_for(r"generated +[1-9][\d,]* tokens/s")
            terminal.wait_for(r"ops +running")
        since = len(terminal.text)
        terminal.resize(80, 30)
        terminal.wait_for("\n╰─{78}╯", since)
        terminal.type("\x03")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.text


def test_a_wrong_token_ends_it(server: RunningServer, files: dict[str, str]) -> None:
    with running_terminal([QUIRE, "top", "--server", server.admin, "--token-file", files["wrong"]]) as terminal:
        assert terminal.wait() == 1
        assert "UNAUTHENTICATED" in terminal.text


def test_a_server_that_ends_is_said_and_one_in_its_place_is_found() -> None:
    with running_server("--engine", "thread") as server:
        port = server.admin.rpartition(":")[2]
        with running_terminal([QUIRE, "top", "--server", server.admin, "--interval", "0.2"]) as terminal:
            terminal.wait_for("1 engine")
            assert server.stop() == 0
            terminal.wait_for("no server answers at [^ ]+")
            gone = once("--server", server.admin)
            assert gone.returncode == 1
            assert "no server answers" in gone.stderr
            since = len(terminal.text)
            with running_server("--engine", "thread", "--admin-port", port):
                terminal.wait_for("up .{0,12}; 0 tokens generated", since)
                terminal.type("q")
                assert terminal.wait() == 0
    assert "Traceback" not in terminal.text
