"""The tables of docs/reference/ports.md."""

import re
from dataclasses import dataclass
from pathlib import Path
from socket import SocketKind

import psutil

from tests.support.processes import tree, wait_until
from tests.support.server import RunningServer

PAGE = Path(__file__).parents[2] / "docs/reference/ports.md"


@dataclass(frozen=True)
class Row:
    """processes: whose command line has one of these texts. port: "any", a number or a range. bound: an address."""

    processes: tuple[str, ...]
    port: str
    bound: str
    flags: tuple[str, ...]


def rows(section: str) -> list[Row]:
    """Returns the rows of the table under the heading that begins so."""
    (text,) = (part for part in PAGE.read_text().split("\n## ")[1:] if part.startswith(section))
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [Row(tuple(_code(cells[0])), cells[1].strip(), cells[3].strip(), tuple(_code(cells[5]))) for cells in table]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def listening(server: RunningServer) -> list[tuple[str, str, int]]:
    """Command line, address and port of each socket of the server's tree that listens."""
    return [
        (" ".join(process.cmdline()), socket.laddr.ip.removeprefix("::ffff:"), socket.laddr.port)
        for process in [psutil.Process(server.process.pid), *tree(server.process.pid)]
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN or socket.type is SocketKind.SOCK_DGRAM
    ]


def addresses(server: RunningServer) -> tuple[str, str, str]:
    """Returns the addresses that it says itself."""
    return server.address, server.metrics_url, server.admin


def check_those_of_ray(server: RunningServer) -> None:
    """Each is in its table, and each row of that is there."""
    own = {int(address.removesuffix("/metrics").rpartition(":")[2]) for address in addresses(server)}
    table = rows("`--ray`")

    def found() -> list[tuple[str, str, int]]:
        return [socket for socket in listening(server) if socket[2] not in own]

    def lacking() -> list[Row]:
        """Rows whose processes have another number of sockets than the table has rows for them."""
        sockets = found()
        wanted = [sum(other.processes == row.processes for other in table) for row in table]
        return [r for r, n in zip(table, wanted, strict=True) if sum(_fits(r, *one) for one in sockets) != n]

    # Ray's monitor listens a while after the cluster serves.
    wait_until(lambda: not lacking(), "each row of the table has its sockets")
    assert [socket for socket in found() if not any(_fits(row, *socket) for row in table)] == []


def _fits(row: Row, command: str, address: str, port: int) -> bool:
    return row.bound == address and any(name in command for name in row.processes) and row.port in ("any", str(port))
