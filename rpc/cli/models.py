"""`quire models`: lists the models of a running server, or the architectures that any server can serve."""

from typing import Annotated, Any

import typer

from rpc.cli.connection import ConnectionOptions, said, security_of
from rpc.cli.options import with_settings

SECONDS = 15


@with_settings({ConnectionOptions: "Connection"})
def models(
    server: Annotated[str, typer.Option(help="HOST:PORT of a running `quire serve`.")] = "127.0.0.1:50051",
    supported: Annotated[
        bool, typer.Option("--supported", help="Print what config.json may name as architecture, and ask no server.")
    ] = False,
    **values: Any,
) -> None:
    """Print the names of the models that a running server serves, one a line."""
    if supported:
        _print_supported()
        return
    from rpc.client import Client, QuireError

    try:
        with Client(server, security_of(values), SECONDS) as client:
            for model in client.models():
                print(model.name)
    except (QuireError, ValueError, OSError) as error:
        typer.echo(f"quire: {said(error)}", err=True)
        raise typer.Exit(1) from None


def _print_supported() -> None:
    from model.families import ALIASES, TEXT_ALONE
    from model.served import TEXT, WITH_IMAGES

    width = max(map(len, (*TEXT, *TEXT_ALONE, *WITH_IMAGES)))
    aliases = {alias: TEXT[architecture] for alias, architecture in (ALIASES | TEXT_ALONE).items()}
    for architecture, family in (TEXT | aliases).items():
        print(f"{architecture:<{width}}  {family}")
    for architecture, family in WITH_IMAGES.items():
        print(f"{architecture:<{width}}  {family}, with images")
