"""A server listens on what docs/reference/ports.md says, and on nothing else; with Ray: `test_engine_process`."""

import json
import socket
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from rpc.gateway.settings import GatewaySettings
from rpc.settings import ListenSettings
from tests.support.gateway import running_gateway
from tests.support.ports import PAGE, addresses, listening, rows
from tests.support.secrets import write
from tests.support.server import RunningServer, running_alone, running_frontend, running_server

ALONE = "One process"
OFF = "off"  # a port that is there only where it is asked for


@pytest.mark.parametrize("flags", [("--engine", "thread", "--dashboard-port", "0"), ("--replicas", "2")], ids=" ".join)
def test_a_server_without_ray_has_the_ports_of_the_table(flags: tuple[str, ...]) -> None:
    with running_server(*flags) as server:
        found = listening(server)
        said = [
            address.removeprefix("http://").rstrip("/") for address in (*addresses(server), server.dashboard) if address
        ]
        given = [address.removesuffix("/metrics") for address in said]
        # The test's server has free ports: they are those that it says, one for each row that is not off.
        assert sorted(f"{address}:{port}" for _, address, port in found) == sorted(given)
        table = [row for row in rows(ALONE) if row.port != OFF or "--dashboard-port" in flags]
        assert len(table) == len(found)
        assert {row.bound for row in table} == {address for _, address, _ in found}
        assert all(name in command for row in table for name in row.processes for command, _, _ in found)


def test_the_table_has_the_ports_of_the_settings() -> None:
    defaults = {
        "--" + f.name.replace("_", "-"): OFF if f.default is None else str(f.default) for f in fields(ListenSettings)
    }
    table = rows(ALONE)
    assert [row.port for row in table] == [defaults[row.flags[-1]] for row in table]
    assert {row.bound for row in table} == {defaults["--host"]}


def own(server: RunningServer) -> list[str]:
    """HOST:PORT of each port of the table."""
    return [address.removeprefix("http://").removesuffix("/metrics") for address in addresses(server)]


def found(server: RunningServer) -> list[str]:
    return sorted(f"{address}:{port}" for _, address, port in listening(server))


def test_ports_of_engines_and_for_frontends_are_those_below_the_table(tmp_path: Path) -> None:
    targets, token = tmp_path / "targets.json", write(tmp_path / "token", b"t" * 32)
    with socket.create_server(("127.0.0.1", 0)) as free:
        join = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ("--join-address", join, "--join-token-file", token, "--kv-cache-memory", "64MiB", "--replicas", "2")
    with running_alone(*flags, "--metrics-targets", str(targets)) as server:
        engines = [address for target in json.loads(targets.read_text()) for address in target["targets"]]
        assert len(engines) == 2
        assert all(address.startswith("127.0.0.1:") for address in engines)
        assert found(server) == sorted([*own(server), join, *engines])
        with running_frontend(join, "--join-token-file", token) as guest:
            assert found(guest) == sorted(own(guest))


def test_a_gateway_has_one_port() -> None:
    with running_gateway(["127.0.0.1:1"]) as gateway:
        sockets = psutil.Process(gateway.process.pid).net_connections("inet")
        assert [tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN] == [
            ("127.0.0.1", gateway.port)
        ]
    default = GatewaySettings()
    assert f"`quire gateway` has one port, {default.host}:{default.port}\n" in PAGE.read_text()
