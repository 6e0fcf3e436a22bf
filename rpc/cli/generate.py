"""`quire generate`: a text from a running server, as it comes."""

import sys
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpc.cli.connection import ConnectionOptions, said, security_of
from rpc.cli.options import build, with_settings

if TYPE_CHECKING:
    from quire.v1 import generation_service_pb2 as pb

    from rpc.client import Client

UINT32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Fields of quire.v1.SamplingParameters; what is unset the server decides."""

    temperature: float | None = field(default=None, metadata={"help": "0 is greedy. Unset: the model's default."})
    top_p: float | None = field(default=None, metadata={"help": "Nucleus mass in (0, 1]."})
    top_k: int | None = field(default=None, metadata={"help": "0 is off.", "min": 0, "max": UINT32})
    min_p: float | None = field(default=None, metadata={"help": "In [0, 1]."})
    repetition_penalty: float | None = field(
        default=None, metadata={"help": "Of tokens of prompt and output; above 0, 1 is off."}
    )
    frequency_penalty: float | None = field(
        default=None, metadata={"help": "For each time that a token is in the output; in [-2, 2]."}
    )
    presence_penalty: float | None = field(default=None, metadata={"help": "If a token is in the output; in [-2, 2]."})
    bad_words: list[str] | None = field(
        default=None, metadata={"flag": "--bad-word", "help": "Never generated; may be given several times."}
    )
    seed: int | None = field(default=None, metadata={"help": "Makes sampling repeatable.", "min": 0, "max": 2**64 - 1})


@dataclass(frozen=True, slots=True)
class StoppingOptions:
    """Fields of quire.v1.StoppingCriteria; what is unset the server decides."""

    max_tokens: int | None = field(
        default=None, metadata={"help": "Most tokens to generate. Unset: what fits.", "min": 1, "max": UINT32}
    )
    min_tokens: int | None = field(
        default=None, metadata={"help": "Least tokens before anything stops it.", "min": 0, "max": UINT32}
    )
    stop: list[str] | None = field(default=None, metadata={"help": "Stop string; may be given several times."})


@with_settings({SamplingOptions: "Sampling", StoppingOptions: "Stopping", ConnectionOptions: "Connection"})
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; - reads it from standard input.")],
    server: Annotated[
        list[str],
        typer.Option(
            help="HOST:PORT of a running `quire serve`; given several times, the next one goes on where one is lost."
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer reads it, nobody writes to it
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
            help="PNG or JPEG file, for a model that sees; may be given several times. With --chat it stands before "
            "the text, else the text has the model's marker in its place.",
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
    shown = Shown("" if quiet or chat else text)
    try:
        images = [read_image(file) for file in image or ()]
        given = asdict(build(SamplingOptions, values)) | asdict(build(StoppingOptions, values)) | {"model": model}
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
    """

    def __init__(self, prompt: str) -> None:
        self._prompt, self._begun = prompt, False

    def add(self, text: str) -> None:
        print(text if self._begun else self._prompt + text, end="", flush=True)
        self._begun = True

    def end(self) -> None:
        """Ends the last line, where there is one."""
        if self._begun:
            print(flush=True)


def _show(client: "Client", spec: "pb.GenerationSpec", shown: Shown) -> str:
    """Shows the answer as it comes. Returns a summary."""
    from quire.v1 import generation_service_pb2 as pb

    usage, reason, seed = pb.Usage(), pb.FINISH_REASON_UNSPECIFIED, 0
    with client.stream_request(pb.StreamGenerateRequest(spec=spec)) as stream:
        for message in stream:
            seed = message.prompt_info.seed or seed
            for delta in message.deltas:
                shown.add(delta.text)
                reason = delta.finish_reason or reason
            usage = message.usage
    ended = pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return f"{usage.prompt_tokens} prompt + {usage.completion_tokens} generated tokens, {ended}, seed {seed}"
