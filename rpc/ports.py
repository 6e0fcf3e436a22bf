"""Ports that a process listens on."""

import errno
import socket
from pathlib import Path

import grpc
from grpc import aio

REMEDY = "choose another one (0 is any free port), or end what listens there"


def bracketed(host: str) -> str:
    """Returns the host as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def open_port(
    server: aio.Server, flag: str, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Lets a gRPC server listen on a port.

    Args:
        server: The server.
        flag: Flag that errors name.
        host: Address to listen on.
        port: TCP port; 0 takes a free one.
        credentials: TLS credentials; None: no TLS.

    Returns:
        HOST:PORT with the port that the server got.

    Raises:
        OSError: The port cannot be opened.
    """
    check_free(flag, host, port)
    wanted = f"{bracketed(host)}:{port}"
    try:
        if credentials is None:
            got = server.add_insecure_port(wanted)
        else:
            got = server.add_secure_port(wanted, credentials)
    except RuntimeError as error:
        raise OSError(f"{flag} {port} on {host} cannot be opened: {error}") from None
    return f"{bracketed(host)}:{got}"


def check_free(flag: str, host: str, port: int) -> None:
    """Raises OSError, which names the flag, where the port cannot be opened.

    gRPC reports that too, but without the reason, and its core first writes lines of its own to standard error.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"{flag} {port} on {host} cannot be opened: {error.strerror}") from None
    failures = [failure for family, *_, address in addresses if (failure := _bind_failure(family, address))]
    taken = next((failure for failure in failures if failure.errno == errno.EADDRINUSE), None)
    if taken is not None:
        raise OSError(f"{flag} {port} on {host} cannot be opened: {taken.strerror}; {REMEDY}")
    if len(failures) == len(addresses):  # a name may have addresses that this machine lacks; one is enough
        raise OSError(f"{flag} {port} on {host} cannot be opened: {failures[0].strerror}")


def check_path_free(flag: str, path: Path) -> None:
    """Raises OSError, which names the flag, where no Unix socket can be made at the path.

    Removes a socket that no process listens on any more. gRPC itself would take the path of a live server, and that
    server would remove it at its end.
    """
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(f"{flag} unix:{path} is another server's")
        path.unlink(missing_ok=True)
    if failure := _bind_failure(socket.AF_UNIX, str(path)):
        raise OSError(f"{flag} unix:{path} cannot be opened: {failure.strerror or failure}")
    path.unlink(missing_ok=True)


def _bind_failure(family: int, address: object) -> OSError | None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC does: connections of the last server that are still being closed do not keep the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)  # type: ignore[arg-type]
        except OSError as error:
            return error
    return None
