"""`quire generate`: a text from a running server, as it comes."""

import sys
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpc.cli.connection import ConnectionOptions, said, security_of
from rpc.cli.options import build, with_settings
from rpc.cli.parameters import SamplingOptions, StoppingOptions
from rpc.cli.structured import StructuredOptions

if TYPE_CHECKING:
    from quire.v1 import generation_service_pb2 as pb

    from rpc.client import Client


@with_settings(
    {
        SamplingOptions: "Sampling", StoppingOptions: "Stopping", StructuredOptions: "Structured output",
        ConnectionOptions: "Connection",
    }
)  # fmt: skip
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; - reads it from standard input.")],
    server: Annotated[
        list[str],
        typer.Option(
            help="HOST:PORT of a running `quire serve`; given several times, the next one goes on where one is lost."
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer reads it, no code writes to it
    model: Annotated[str, typer.Option(help="Served model's name; unset: the only one.", show_default=False)] = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds for all of it.", show_default=False)] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the text as a user's message, with the model's chat template.")
    ] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="PNG or JPEG file, for a vision-language model; may be given several times. With --chat it stands "
            "before the text, else the text has the model's marker in its place.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the generated text.")] = False,
    **values: Any,
) -> None:
    """Stream text from a running server to the terminal."""
    from rpc.client import Client, QuireError
    from rpc.client.specs import spec_of
    from rpc.image_files import read_image

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    text = sys.stdin.read() if prompt == "-" else prompt
    shown = Shown("" if quiet or chat else text, quiet)
    try:
        images = [read_image(file) for file in image or ()]
        given = asdict(build(SamplingOptions, values)) | asdict(build(StoppingOptions, values)) | {"model": model}
        given["structured_output"] = build(StructuredOptions, values).option()
        turns = [{"role": "user", "content": [*images, text]}]
        spec = spec_of(turns, **given) if chat else spec_of(text, images, **given)
        with Client(server, security_of(values), timeout) as client:
            summary = _show(client, spec, shown)
    except (QuireError, OSError, ValueError) as error:
        shown.end()
        typer.echo(f"quire: {said(error)}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        shown.end()
        raise typer.Exit(130) from None
    shown.end()
    if not quiet:
        typer.echo(f"[{summary}]", err=True)


class Shown:
    """Text on the terminal, as it comes.

    Args:
        prompt: Text that stands before an answer. Without an answer it is not shown.
        quiet: Reasoning is not shown.
    """

    def __init__(self, prompt: str, quiet: bool) -> None:
        self._prompt, self._quiet = prompt, quiet
        self._begun = self._thought = False

    def add(self, text: str) -> None:
        if not text:
            return
        if self._thought:
            typer.echo("", err=True)
            self._thought = False
        print(text if self._begun else self._prompt + text, end="", flush=True)
        self._begun = True

    def think(self, text: str) -> None:
        """Shows reasoning apart from the text, which may go to a file."""
        if text and not self._quiet:
            typer.echo(typer.style(text, dim=True), err=True, nl=False)
            self._thought = True

    def end(self) -> None:
        """Ends the last line, where there is one."""
        if self._begun:
            print(flush=True)


def _show(client: "Client", spec: "pb.GenerationSpec", shown: Shown) -> str:
    """Shows the answer as it comes. Returns a summary."""
    from quire.v1 import generation_service_pb2 as pb

    from rpc.terminal.interrupt import cancelled_by_ctrl_c

    usage, reason, seed = pb.Usage(), pb.FINISH_REASON_UNSPECIFIED, 0
    stream = client.stream_request(pb.StreamGenerateRequest(spec=spec))
    with cancelled_by_ctrl_c(stream), stream:
        for message in stream:
            seed = message.prompt_info.seed or seed
            for delta in message.deltas:
                shown.think(delta.reasoning)
                shown.add(delta.text)
                reason = delta.finish_reason or reason
            usage = message.usage
    ended = pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return f"{usage.prompt_tokens} prompt + {usage.completion_tokens} generated tokens, {ended}, seed {seed}"
