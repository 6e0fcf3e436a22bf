"""`quire models`: lists the models of a running server."""

from typing import Annotated, Any

import typer

from rpc.cli.connection import ConnectionOptions, said, security_of
from rpc.cli.options import with_settings

SECONDS = 15


@with_settings({ConnectionOptions: "Connection"})
def models(
    server: Annotated[str, typer.Option(help="HOST:PORT of a running `quire serve`.")] = "127.0.0.1:50051",
    **values: Any,
) -> None:
    """Print the names of the models that a running server serves, one a line."""
    from rpc.client import Client, QuireError

    try:
        with Client(server, security_of(values), SECONDS) as client:
            for model in client.models():
                print(model.name)
    except (QuireError, ValueError, OSError) as error:
        typer.echo(f"quire: {said(error)}", err=True)
        raise typer.Exit(1) from None
