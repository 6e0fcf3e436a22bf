"""`quire top`: shows a running server at work in the terminal."""

from typing import Annotated

import typer

from rpc.cli.connection import TokenFile, said, token_in

LINES = 40  # lines of a printed picture


def top(
    server: Annotated[
        str, typer.Option(help="HOST:PORT of AdminService: the admin port of `quire serve`.")
    ] = "127.0.0.1:50052",
    token_file: TokenFile = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and exit. Implied without a terminal.")
    ] = False,
) -> None:
    """Watch a running server: throughput, times to the first token, each KV page, engines, tenants, requests."""
    from rich.console import Console

    from rpc.client.errors import QuireError
    from rpc.client.security import Security
    from rpc.terminal.screen import show
    from rpc.terminal.view import picture
    from rpc.terminal.watch import ServerWatch, look_twice

    console = Console()
    try:
        security = Security(token_in(token_file))
        if once or not console.is_terminal:
            seen = look_twice(server, security, interval)
            console.print(picture(seen, console.width, LINES, live=False))
            return
        with ServerWatch(server, security, interval) as watch:
            show(console, watch)
    except (QuireError, ValueError, OSError) as error:
        typer.echo(f"quire: {said(error, of_operators=True)}", err=True)
        raise typer.Exit(1) from None
