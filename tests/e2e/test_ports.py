"""A server listens on what docs/ports.md says, and on nothing else; with Ray: `test_engine_process`."""

from dataclasses import fields

import pytest

from rpc.settings import ListenSettings
from tests.support.ports import addresses, listening, rows
from tests.support.server import running_server

ALONE = "One process"
OFF = "off"  # a port that is there only where it is asked for


@pytest.mark.parametrize("flags", [("--engine", "thread", "--page-port", "0"), ("--replicas", "2")], ids=" ".join)
def test_a_server_without_ray_has_the_ports_of_the_table(flags: tuple[str, ...]) -> None:
    with running_server(*flags) as server:
        found = listening(server)
        said = [address.removeprefix("http://").rstrip("/") for address in (*addresses(server), server.page) if address]
        given = [address.removesuffix("/metrics") for address in said]
        # The test's server has free ports: they are those that it says, one for each row that is not off.
        assert sorted(f"{address}:{port}" for _, address, port in found) == sorted(given)
        table = [row for row in rows(ALONE) if row.port != OFF or "--page-port" in flags]
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
