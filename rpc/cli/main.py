"""The `quire` command. Imports torch only where a command needs it."""

import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from rpc.cli.options import load_defaults, parse_size

app = typer.Typer(
    help="Quire serves language models from a paged KV cache, with continuous batching, over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Every flag can also stand in a TOML file (--config) or, weaker still, in the environment: --page-size as "
    "QUIRE_PAGE_SIZE.",
)

Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file of flags: `port = 50051`, `max-batched-tokens = 512`. The command line is stronger.",
        callback=load_defaults,
        is_eager=True,
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(help="Model directory (Hugging Face layout), a name on the hub, or `demo` for the one that ships."),
]
Dtype = Annotated[str, typer.Option(help="Weights and KV: auto (the checkpoint's), float32, bfloat16 or float16.")]
PageSize = Annotated[int, typer.Option(help="Tokens in a KV page.")]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        help="Bytes for the KV pool: 512MiB, 2GiB. Unset: half of the free memory (on a GPU 90 %), but no more than "
        "--max-sequences times the model's context needs.",
        show_default=False,
    ),
]


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
def serve(
    model: Model = "demo",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in requests. Unset: the directory's.", show_default=False)
    ] = None,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel="Addresses")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="gRPC port; 0 picks a free one.", rich_help_panel="Addresses")] = 50051,
    metrics_port: Annotated[
        int, typer.Option(help="HTTP port of /metrics, loopback only; 0 picks a free one.", rich_help_panel="Addresses")
    ] = 9464,
    allow_insecure_bind: Annotated[
        bool,
        typer.Option(
            "--allow-insecure-bind",
            help="Listen on a --host that other machines reach, without TLS and token.",
            rich_help_panel="Addresses",
        ),
    ] = False,
    reflection: Annotated[
        bool, typer.Option("--reflection", help="Serve gRPC reflection.", rich_help_panel="Addresses")
    ] = False,
    page_size: PageSize = 16,
    kv_cache_memory: KVCacheMemory = None,
    max_batched_tokens: Annotated[
        int,
        typer.Option(help="Token budget of a step, decodes and prefill chunks together.", rich_help_panel="Scheduling"),
    ] = 512,
    max_sequences: Annotated[int, typer.Option(help="Sequences that run at once.", rich_help_panel="Scheduling")] = 256,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="Most prompt tokens of one request in a step. Unset: the whole budget.",
            rich_help_panel="Scheduling",
            show_default=False,
        ),
    ] = None,
    steps_in_flight: Annotated[
        int,
        typer.Option(help="2: plan a step while the one before runs (for a GPU).", rich_help_panel="Scheduling"),
    ] = 1,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait.", rich_help_panel="Limits")] = 1024,
    max_queue_time: Annotated[
        float, typer.Option(help="Seconds a request may wait, predicted or real.", rich_help_panel="Limits")
    ] = 30.0,
    max_request_time: Annotated[
        float, typer.Option(help="Seconds a request may take in all.", rich_help_panel="Limits")
    ] = 600.0,
    drain_time: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", rich_help_panel="Limits")
    ] = 60.0,
    stall_timeout: Annotated[
        float,
        typer.Option(help="Seconds without progress after which health says NOT_SERVING.", rich_help_panel="Limits"),
    ] = 30.0,
    poison_freed_pages: Annotated[
        bool, typer.Option("--poison-freed-pages", help="Fill freed KV pages with NaN (debugging; slow).")
    ] = False,
    config: Config = None,
) -> None:
    """Serve a model over gRPC until SIGTERM, which drains: running requests end, new ones are refused."""
    import asyncio

    from model.errors import CheckpointError
    from model.settings import ModelSettings
    from rpc.frontend.settings import FrontendSettings
    from rpc.settings import ServerSettings
    from scheduler.settings import QueueLimits, SchedulerSettings

    logging.basicConfig(level=logging.INFO, format="quire: %(message)s", stream=sys.stderr)
    memory = None if kv_cache_memory is None else parse_size(kv_cache_memory)
    try:
        settings = ServerSettings(
            model=ModelSettings(model, dtype, device, page_size, memory, poison_freed_pages),
            served_model_name=served_model_name,
            host=host,
            port=port,
            metrics_port=metrics_port,
            reflection=reflection,
            allow_insecure_bind=allow_insecure_bind,
            scheduler=SchedulerSettings(max_batched_tokens, max_sequences, prefill_chunk, steps_in_flight),
            queue=QueueLimits(max_queue, wait=max_queue_time),
            frontend=FrontendSettings(request_time=max_request_time, drain=drain_time, stall_timeout=stall_timeout),
        )
        from rpc.server import serve as run

        asyncio.run(run(settings, lambda line: print(f"quire: {line}", flush=True)))
    except (CheckpointError, ValueError, OSError, MemoryError) as error:
        _stop(error)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; - reads it from standard input.")],
    server: Annotated[str, typer.Option(help="HOST:PORT of a running `quire serve`.")] = "127.0.0.1:50051",
    model: Annotated[str, typer.Option(help="Served model's name; unset: the only one.", show_default=False)] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 200,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Unset: the model's default.", show_default=False)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.", show_default=False)] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1].", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; may be given several times.", show_default=False)
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for all of it.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the generated text.")] = False,
    config: Config = None,
) -> None:
    """Stream text from a running server to the terminal."""
    from rpc.client import CallFailed, stream_text

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    if not quiet:
        print(text, end="", flush=True)
    try:
        summary = stream_text(
            server, text, model, max_tokens, {k: v for k, v in sampling.items() if v is not None}, stop or [], timeout,
            lambda part: print(part, end="", flush=True),
        )  # fmt: skip
    except CallFailed as error:
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
    model: Model = "demo",
    dtype: Dtype = "auto",
    page_size: PageSize = 16,
    kv_cache_memory: KVCacheMemory = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence. Unset: the model's context.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    config: Config = None,
) -> None:
    """Say what a model's KV cache costs: bytes a token, pages, how many sequences of a length fit. Loads no weights."""
    from model.errors import CheckpointError
    from rpc.cli.estimate import show
    from rpc.paths import model_directory

    memory = None if kv_cache_memory is None else parse_size(kv_cache_memory)
    try:
        show(model_directory(model), dtype, page_size, memory, length, json)
    except (CheckpointError, ValueError) as error:
        _stop(error)


def _stop(error: BaseException) -> None:
    typer.echo(f"quire: {error}", err=True)
    raise typer.Exit(1)


def main() -> None:
    app()
