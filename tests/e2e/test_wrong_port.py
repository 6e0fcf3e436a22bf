"""Commands whose port is a server's other one, or closed, and flags that no look could have."""

from collections.abc import Iterator

import pytest

from tests.support.server import QUIRE, RunningServer, quire, running_server
from tests.support.terminal import running_terminal

NOBODY = "127.0.0.1:1"
FOR_OPERATORS = "it has no AdminService. That is on the server's admin port, 50052 unless --admin-port says another"
FOR_REQUESTS = "it answers no requests. Those go to the server's own port, 50051 unless --port says another"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--engine", "thread", "--kv-cache-memory", "4MiB") as running:
        yield running


@pytest.mark.parametrize("command", [("top", "--once"), ("admin", "requests"), ("cluster", "status")])
def test_an_operator_s_command_on_the_port_of_requests(server: RunningServer, command: tuple[str, ...]) -> None:
    done = quire(*command, "--server", server.address)
    assert (done.returncode, done.stderr) == (1, f"quire: {server.address} is the wrong port: {FOR_OPERATORS}\n")


@pytest.mark.parametrize("command", [("models",), ("generate", "ROMEO:"), ("chat", "--text")])
def test_a_request_on_the_port_of_operators(server: RunningServer, command: tuple[str, ...]) -> None:
    done = quire(*command, "--server", server.admin)
    assert (done.returncode, done.stderr) == (1, f"quire: {server.admin} is the wrong port: {FOR_REQUESTS}\n")


def test_a_live_picture_of_the_wrong_port_is_not_tried_again(server: RunningServer) -> None:
    with running_terminal([QUIRE, "top", "--server", server.address], columns=200) as terminal:
        assert terminal.wait() == 1
        assert f"is the wrong port: {FOR_OPERATORS}" in terminal.text


@pytest.mark.slow
def test_where_nobody_is_the_hint_is_how_to_start_one() -> None:
    hint = f"quire: no server answers at {NOBODY}. Start one with `make serve`, or name another with --server"
    assert quire("top", "--once", "--server", NOBODY).stderr == f"{hint}\n"
    for flags in ((), ("--text",)):
        with running_terminal([QUIRE, "chat", *flags, "--server", NOBODY], columns=200) as terminal:
            assert terminal.wait() == 1, "nothing was typed"
            assert hint in terminal.text
            assert "> " not in terminal.text


@pytest.mark.parametrize("interval", ["inf", "nan", "1e300", "100000", "0"])
def test_an_interval_that_nobody_waits_for_is_refused(interval: str) -> None:
    done = quire("top", "--once", "--server", NOBODY, "--interval", interval)
    assert done.returncode == 2
    assert "Invalid value for '--interval'" in done.stderr
    assert "Traceback" not in done.stderr
