"""The `quire` command. Imports torch only where a command needs it."""

import logging
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from cache_manager.settings import CacheSettings
from model.settings import ModelSettings
from rpc.cli.admin import admin
from rpc.cli.batch import batch
from rpc.cli.cache_sim import cache_sim
from rpc.cli.cluster import cluster
from rpc.cli.options import Config, build, parse_size, with_settings
from rpc.frontend.settings import FrontendSettings
from rpc.settings import (
    EngineSettings,
    JoinedSettings,
    JoinSettings,
    ListenSettings,
    ServerSettings,
    SharingSettings,
)
from scheduler.settings import ImageLimits, QueueLimits, RequestLimits, ScalingSettings, SchedulerSettings

UINT32 = 2**32 - 1

app = typer.Typer(
    help="Quire serves language models from a paged KV cache, with continuous batching, over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="The flags of serve, frontend, batch and estimate can also stand in a TOML file (--config) or, weaker, in "
    "the environment: --page-size as QUIRE_PAGE_SIZE.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {version('quire')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@with_settings(
    {
        ModelSettings: None,
        ListenSettings: "Addresses",
        EngineSettings: "Engine",
        ScalingSettings: "More engines and fewer",
        SchedulerSettings: "Scheduling",
        CacheSettings: "Prefix cache",
        QueueLimits: "Queue",
        FrontendSettings: "Times and clients",
        RequestLimits: "Most that one request may ask for",
        ImageLimits: "Images",
        SharingSettings: "Other frontends",
    }
)
def serve(config: Config = None, **values: Any) -> None:
    """Serve a model over gRPC until SIGTERM, which drains: running requests end, new ones are refused."""

    def run() -> None:
        import asyncio

        from rpc.server import serve as serve_own

        settings = ServerSettings(
            model=build(ModelSettings, values),
            listen=build(ListenSettings, values),
            engine=build(EngineSettings, values),
            scheduler=build(SchedulerSettings, values),
            queue=build(QueueLimits, values),
            request=build(RequestLimits, values),
            images=build(ImageLimits, values),
            cache=build(CacheSettings, values),
            frontend=build(FrontendSettings, values),
            sharing=build(SharingSettings, values),
            scaling=build(ScalingSettings, values),
        )
        asyncio.run(serve_own(settings, _announce))

    _serve(run)


@app.command()
@with_settings(
    {
        JoinSettings: None,
        ListenSettings: "Addresses",
        FrontendSettings: "Times and clients",
        RequestLimits: "Most that one request may ask for",
        ImageLimits: "Images",
    }
)
def frontend(
    model: Annotated[str, typer.Option(help="The model that the server serves, as its own --model.")] = "demo",
    served_model_name: Annotated[
        str | None, typer.Option(help="Its name in requests. Unset: the directory's.", show_default=False)
    ] = None,
    config: Config = None,
    **values: Any,
) -> None:
    """Serve with the engines of a running `quire serve`, which has a --join-address: more clients than one process can
    answer, and clients go on here when that one ends.
    """

    def run() -> None:
        import asyncio

        from rpc.server import serve_joined

        settings = JoinedSettings(
            model=ModelSettings(model, served_model_name),
            join=build(JoinSettings, values),
            listen=build(ListenSettings, values),
            request=build(RequestLimits, values),
            images=build(ImageLimits, values),
            frontend=build(FrontendSettings, values),
        )
        asyncio.run(serve_joined(settings, _announce))

    _serve(run)


def _announce(line: str) -> None:
    print(f"quire: {line}", flush=True)


def _serve(run: Callable[[], None]) -> None:
    """Whatever keeps it from serving is said in a line."""
    from model.errors import CheckpointError
    from rpc.engines.process import EngineStartError
    from rpc.frontend.errors import RequestFailed

    logging.basicConfig(level=logging.INFO, format="quire: %(message)s", stream=sys.stderr)
    try:
        run()
    except (CheckpointError, EngineStartError, RequestFailed, ValueError, OSError, MemoryError) as error:
        _stop(error)


def _given(options: Mapping[str, object]) -> dict[str, object]:
    """Those that are set."""
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; - reads it from standard input.")],
    server: Annotated[
        list[str],
        typer.Option(
            help="HOST:PORT of a running `quire serve`; given several times, the next one goes on where one is lost."
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer reads it, nobody writes to it
    model: Annotated[str, typer.Option(help="Served model's name; unset: the only one.", show_default=False)] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=UINT32, help="Most tokens to generate. Unset: what fits.", show_default=False),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Unset: the model's default.", show_default=False)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=UINT32, help="0 is off.", show_default=False)] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1].", show_default=False)] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Of tokens of prompt and output; above 0, 1 is off.", show_default=False),
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="For each time that a token is in the output; in [-2, 2].", show_default=False)
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="If a token is in the output; in [-2, 2].", show_default=False)
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Never generated; may be given several times.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling repeatable.", show_default=False)
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(min=0, max=UINT32, help="Least tokens before anything stops it.", show_default=False),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; may be given several times.", show_default=False)
    ] = None,
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
) -> None:
    """Stream text from a running server to the terminal."""
    from rpc.client import CallFailed, stream_text
    from rpc.image_files import read_image

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed,
        "repetition_penalty": repetition_penalty, "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty, "bad_words": bad_word,
    }  # fmt: skip
    stopping = {"max_tokens": max_tokens, "min_tokens": min_tokens, "stop": stop}
    if not (quiet or chat):
        print(text, end="", flush=True)
    try:
        summary = stream_text(
            server, text, model, _given(sampling), _given(stopping), timeout,
            lambda part: print(part, end="", flush=True), chat, [read_image(file) for file in image or ()],
        )  # fmt: skip
    except (CallFailed, OSError, ValueError) as error:
        print(flush=True)
        _stop(error)
    except KeyboardInterrupt:
        print(flush=True)
        raise typer.Exit(130) from None
    print(flush=True)
    if not quiet:
        typer.echo(f"[{summary}]", err=True)


@app.command()
def estimate(
    model: Annotated[str, typer.Option(help="Model directory, a name on the hub, or `demo`.")] = "demo",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="KV in auto (as --dtype), one of these, int8 or fp8.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8: of the weights. Unset: none.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a KV page.")] = 16,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Bytes for KV. Unset: half of the free memory.", show_default=False
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence. Unset: the model's context.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    config: Config = None,
) -> None:
    """Say what a model's KV cache and weights cost: bytes a token, pages, how many sequences of a length fit.

    Loads no weights.
    """
    from model.errors import CheckpointError
    from rpc.cli.estimate import show
    from rpc.paths import model_directory

    try:
        settings = ModelSettings(
            model,
            dtype=dtype,
            page_size=page_size,
            kv_cache_memory=kv_cache_memory,
            kv_cache_dtype=kv_cache_dtype,
            quantization=quantization,
        )
        show(model_directory(model), settings, length, json)
    except (CheckpointError, ValueError) as error:
        _stop(error)


app.command()(batch)
app.command()(cache_sim)
app.add_typer(admin, name="admin")
app.add_typer(cluster, name="cluster")


def _stop(error: BaseException) -> None:
    typer.echo(f"quire: {error}", err=True)
    raise typer.Exit(1)


def main() -> None:
    app()
