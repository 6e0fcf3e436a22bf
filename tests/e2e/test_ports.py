"""A server listens on what docs/ports.md says, and on nothing else."""

from dataclasses import fields
from socket import SocketKind

import psutil
import pytest

from rpc.settings import ListenSettings
from tests.support.ports import Row, rows
from tests.support.processes import temporary_directory, tree
from tests.support.server import RunningServer, running_server

ALONE, RAY = "One process", "`--ray`"


def listening(server: RunningServer) -> list[tuple[str, str, int]]:
    """Command line, address and port of each socket of the server's tree that listens."""
    return [
        (" ".join(process.cmdline()), socket.laddr.ip.removeprefix("::ffff:"), socket.laddr.port)
        for process in [psutil.Process(server.process.pid), *tree(server.process.pid)]
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN or socket.type is SocketKind.SOCK_DGRAM
    ]


def fits(row: Row, command: str, address: str, port: int) -> bool:
    return row.bound == address and any(name in command for name in row.processes) and row.port in ("any", str(port))


@pytest.mark.parametrize("flags", [("--engine", "thread"), ("--replicas", "2")], ids=" ".join)
def test_a_server_without_ray_has_three_ports(flags: tuple[str, ...]) -> None:
    with running_server(*flags) as server:
        found = listening(server)
        given = [address.removeprefix("http://").removesuffix("/metrics") for address in _addresses(server)]
        # The test's server has free ports: they are those that it says, one for each row.
        assert sorted(f"{address}:{port}" for _, address, port in found) == sorted(given)
        table = rows(ALONE)
        assert len(table) == len(found)
        assert {row.bound for row in table} == {address for _, address, _ in found}
        assert all(name in command for row in table for name in row.processes for command, _, _ in found)


def test_the_table_has_the_ports_of_the_settings() -> None:
    defaults = {"--" + f.name.replace("_", "-"): str(f.default) for f in fields(ListenSettings)}
    table = rows(ALONE)
    assert [row.port for row in table] == [defaults[row.flags[-1]] for row in table]
    assert {row.bound for row in table} == {defaults["--host"]}


@pytest.mark.slow
def test_a_server_with_ray_has_those_of_the_table_too() -> None:
    with temporary_directory(), running_server("--ray") as server:
        own = {int(address.removesuffix("/metrics").rpartition(":")[2]) for address in _addresses(server)}
        found = [socket for socket in listening(server) if socket[2] not in own]
        # Another cluster of this machine may have 44217: then Ray takes the next port that is free.
        table = [Row(row.processes, "any", row.bound, row.flags) for row in rows(RAY)]
        assert [socket for socket in found if not any(fits(row, *socket) for row in table)] == []
        for row in table:
            wanted = sum(other.processes == row.processes for other in table)
            assert sum(fits(row, *socket) for socket in found) == wanted, row


def _addresses(server: RunningServer) -> tuple[str, str, str]:
    return server.address, server.metrics_url, server.admin
