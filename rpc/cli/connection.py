"""Flags of commands that talk to a running server: who they are, and which server is the right one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpc.cli.options import build
from rpc.private_files import read_token

if TYPE_CHECKING:
    from rpc.client.security import Security

NO_ADMIN = "it has no AdminService. That is on the server's admin port, 50052 unless --admin-port says another"
NO_REQUESTS = "it answers no requests. Those go to the server's own port, 50051 unless --port says another"
HELP = "File with your token, and nothing else; readable by nobody else."
TokenFile = Annotated[Path | None, typer.Option("--token-file", help=HELP, show_default=False)]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """To servers that ask for tokens or have certificates."""

    token_file: str | None = field(default=None, metadata={"help": HELP})
    tls: bool = field(default=False, metadata={"help": "The server has a certificate that this machine trusts."})
    tls_ca: str | None = field(
        default=None, metadata={"help": "PEM file of who signed the server's certificate, where that is somebody else."}
    )
    tls_cert: str | None = field(
        default=None, metadata={"help": "PEM file of a certificate of your own, for servers that ask for one."}
    )
    tls_key: str | None = field(default=None, metadata={"help": "PEM file of its key."})
    plaintext_token: bool = field(
        default=False, metadata={"help": "The token may go to other machines without TLS, where it can be read."}
    )


def security_of(values: Mapping[str, Any]) -> "Security":
    """From a command's values. Raises ValueError, OSError."""
    from rpc.client.security import Security

    given = build(ConnectionOptions, values)

    def content(path: str | None) -> bytes | None:
        return None if path is None else Path(path).read_bytes()

    return Security(
        token=token_in(given.token_file),
        tls=given.tls,
        roots=content(given.tls_ca),
        chain=content(given.tls_cert),
        key=content(given.tls_key),
        plaintext=given.plaintext_token,
    )


def token_in(path: str | Path | None) -> str:
    """ "" without a file. Raises ValueError, OSError."""
    return "" if path is None else read_token(Path(path), "--token-file")


def said(error: Exception, of_operators: bool = False) -> str:
    """A client's error, with what a person can do about it on the command line. of_operators: of a command that asks
    AdminService.
    """
    import grpc

    from rpc.client.errors import QuireError

    if isinstance(error, QuireError) and error.code is grpc.StatusCode.UNIMPLEMENTED and not error.reason:
        return f"{error.server} is the wrong port: {NO_ADMIN if of_operators else NO_REQUESTS}"
    hint = ". Start one with `make serve`, or name another with --server"
    return f"{error}{hint if str(error).startswith('no server answers') else ''}"
