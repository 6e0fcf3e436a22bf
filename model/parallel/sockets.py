"""Sockets between ranks, with addresses as gRPC writes them.

An address is HOST:PORT, an IPv6 host in brackets, or `unix-abstract:NAME` for processes of one machine. The latter is a
name of Linux that is no file, so it vanishes with its processes. Any user of the machine can connect to it.
"""

import os
import secrets
import socket

LOCAL = "unix-abstract:"
ALIVE = {  # TCP keepalive: seconds of silence before the first probe, seconds between probes, probes without answer
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))
    if hasattr(socket, name)
}


def new_local() -> str:
    """Returns a local address that no process has."""
    return f"{LOCAL}quire-ranks-{secrets.token_hex(8)}"


def host_port(host: str, port: int) -> str:
    """Joins a host and a port; an IPv6 host comes without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Splits an address into its host, without brackets, and its port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(address: str) -> socket.socket:
    """Opens a listening socket; port 0 takes a free port. Raises OSError."""
    if address.startswith(LOCAL):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + address.removeprefix(LOCAL))
        listener.listen()
        return listener
    host, port = split(address)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def address_of(listener: socket.socket) -> str:
    """Returns the address that `connect` reaches a listener under."""
    name = listener.getsockname()
    return LOCAL + os.fsdecode(name[1:]) if listener.family == socket.AF_UNIX else host_port(name[0], name[1])


def connect(address: str, seconds: float) -> socket.socket:
    """Connects to an address; another machine may take `seconds`. Raises OSError."""
    if address.startswith(LOCAL):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + address.removeprefix(LOCAL))
        return connection
    connection = socket.create_connection(split(address), seconds)
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Sets TCP options: no delay of small writes, and keepalive.

    Steps get no answer, so Nagle's algorithm would hold each back for the one before. Keepalive shows a machine that is
    cut off.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
