"""`quire chat`: holds a conversation with a running server's model."""

import sys
from contextlib import suppress
from dataclasses import asdict
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from rpc.cli.connection import ConnectionOptions, said, security_of
from rpc.cli.options import build, with_settings
from rpc.cli.parameters import SamplingOptions, StoppingOptions


@with_settings({SamplingOptions: "Sampling", StoppingOptions: "Stopping", ConnectionOptions: "Connection"})
def chat(
    server: Annotated[
        list[str],
        typer.Option(
            help="HOST:PORT of a running `quire serve`; may be given several times: if one is lost, the next goes on."
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer only reads it
    model: Annotated[str, typer.Option(help="Served model's name; unset: the only one.", show_default=False)] = "",
    text: Annotated[
        bool, typer.Option("--text", help="Write one text with the model in turn, in place of a conversation.")
    ] = False,
    **values: Any,
) -> None:
    """Talk to a running server's model. /help shows the commands; Ctrl-C stops an answer, Ctrl-D ends."""
    from rpc.client import Client, QuireError
    from rpc.terminal.conversation import Conversation
    from rpc.terminal.talk import NoTemplate, talk

    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and history
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    options = asdict(build(SamplingOptions, values)) | asdict(build(StoppingOptions, values))
    try:
        with Client(server, security_of(values)) as client:
            talk(client, Conversation(text, (SamplingOptions, StoppingOptions), options), model, said)
    except (NoTemplate, QuireError, ValueError, OSError) as error:
        typer.echo(f"quire: {said(error)}", err=True)
        raise typer.Exit(1) from None
