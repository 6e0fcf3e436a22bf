"""Flags of commands that talk to a running server: token, certificates, and hints about ports."""

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
HELP = "File with your token and nothing else, which no other user can read."
TokenFile = Annotated[Path | None, typer.Option("--token-file", help=HELP, show_default=False)]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Token and certificates of a command that calls a server."""

    token_file: str | None = field(default=None, metadata={"help": HELP})
    tls: bool = field(default=False, metadata={"help": "The server has a certificate that this machine trusts."})
    tls_ca: str | None = field(
        default=None,
        metadata={"help": "PEM file of the authority that signed the server's certificate. Unset: a public one."},
    )
    tls_cert: str | None = field(
        default=None, metadata={"help": "PEM file of a certificate of your own, for servers that ask for one."}
    )
    tls_key: str | None = field(default=None, metadata={"help": "PEM file of its key."})
    plaintext_token: bool = field(
        default=False,
        metadata={"help": "The token may go to other machines without TLS, although others can read it on the way."},
    )


def security_of(values: Mapping[str, Any]) -> "Security":
    """Returns the credentials of a command's flags.

    Raises:
        ValueError: The token or a certificate is wrong, or others can read the token's file.
        OSError: A file cannot be read.
    """
    from rpc.client.security import Security

    options = build(ConnectionOptions, values)

    def content(path: str | None) -> bytes | None:
        return None if path is None else Path(path).read_bytes()

    return Security(
        token=token_in(options.token_file),
        tls=options.tls,
        roots=content(options.tls_ca),
        chain=content(options.tls_cert),
        key=content(options.tls_key),
        plaintext=options.plaintext_token,
    )


def token_in(path: str | Path | None) -> str:
    """Returns the token in a file; "" without a file. Raises ValueError, OSError."""
    return "" if path is None else read_token(Path(path), "--token-file")


def said(error: Exception, of_operators: bool = False) -> str:
    """Returns a client's error as a sentence, with a remedy on the command line.

    Args:
        error: The error.
        of_operators: Whether the command calls AdminService.
    """
    import grpc

    from rpc.client.errors import QuireError

    if isinstance(error, QuireError) and error.code is grpc.StatusCode.UNIMPLEMENTED and not error.reason:
        return f"{error.server} is the wrong port: {NO_ADMIN if of_operators else NO_REQUESTS}"
    hint = ". Start one with `make serve`, or name another with --server"
    return f"{error}{hint if str(error).startswith('no server answers') else ''}"
