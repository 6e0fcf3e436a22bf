"""Sockets between ranks, and their addresses as gRPC writes them.

An address is HOST:PORT, an IPv6 host in brackets, or `unix-abstract:NAME` for processes of one machine: a name of Linux
that is no file, so that nothing of it stays, whoever is killed. Any user of the machine can connect to it.
"""

import os
import secrets
import socket

LOCAL = "unix-abstract:"
ALIVE = {  # asked after so many seconds without a word, again each second, given up after so many questions
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))
    if hasattr(socket, name)
}


def new_local() -> str:
    """An address that nobody has."""
    return f"{LOCAL}quire-ranks-{secrets.token_hex(8)}"


def host_port(host: str, port: int) -> str:
    """host: a name or an address of either kind, without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of an address that has them."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(address: str) -> socket.socket:
    """address: with port 0, any. Raises OSError."""
    if address.startswith(LOCAL):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + address.removeprefix(LOCAL))
        listener.listen()
        return listener
    host, port = split(address)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def address_of(listener: socket.socket) -> str:
    """What `connect` finds it under."""
    name = listener.getsockname()
    return LOCAL + os.fsdecode(name[1:]) if listener.family == socket.AF_UNIX else host_port(name[0], name[1])


def connect(address: str, seconds: float) -> socket.socket:
    """seconds: that another machine may take. Raises OSError."""
    if address.startswith(LOCAL):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + address.removeprefix(LOCAL))
        return connection
    connection = socket.create_connection(split(address), seconds)
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Of TCP: steps do not wait for the answer to the one before, which never comes; and a machine that is cut off is
    seen by who waits for it.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
