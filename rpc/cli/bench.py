"""`quire bench serve`: puts a load on a running server, and reports latencies and throughput."""

import asyncio
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rpc.cli.connection import ConnectionOptions, security_of
from rpc.cli.options import build, with_settings
from rpc.distribution import how_to_install
from rpc.loadgen.settings import INPUT, OUTPUT, PROTOCOLS, SERVERS, LoadSettings

if TYPE_CHECKING:
    from rpc.client.security import Security
    from rpc.loadgen.drive import LoadRun
    from rpc.loadgen.observation import Targets
    from rpc.loadgen.plan import RequestPlan
    from rpc.loadgen.wire import ServedModel, Wire

STANDARD_OUTPUT = Path("-")
bench = typer.Typer(help="Measure running servers.", no_args_is_help=True)
COLUMNS = (
    MofNCompleteColumn(),
    BarColumn(),
    TextColumn("{task.fields[running]} running, {task.fields[failed]} failed, {task.fields[tokens]} tokens"),
    TimeElapsedColumn(),
)


@bench.callback()
def _group() -> None:
    pass


@bench.command("serve")
@with_settings({LoadSettings: "Load", ConnectionOptions: "Connection"})
def serve(
    protocol: Annotated[
        str, typer.Option(help="quire (gRPC), inference (Open Inference Protocol), or openai (HTTP, completions).")
    ] = "quire",
    server: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT; for openai http://HOST:PORT/v1. Unset: this machine, at the usual port.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Served model's name; unset: the only one.", show_default=False)] = "",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For openai: the model's directory or name on the hub, for prompts of exact lengths.",
            show_default=False,
        ),
    ] = None,
    ttft_target: Annotated[
        float | None, typer.Option(help="Seconds for a request's first token, for goodput.", show_default=False)
    ] = None,
    tpot_target: Annotated[
        float | None, typer.Option(help="Seconds for each other token on average.", show_default=False)
    ] = None,
    max_error_rate: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Exit with 1 if a larger share of requests fails.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="File for the figures; - is standard output.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File for charts, .png or .html. Needs matplotlib.")
    ] = None,
    **values: Any,
) -> None:
    """Put a load on a running server and report its clients' view: latencies, throughput, goodput, errors.

    Latencies of an open loop (--rate, --trace) count from the time at which a request was due, not from when it was
    sent: a stall of the server counts for all requests that come meanwhile. Ctrl-C shows the figures so far.
    """
    from rpc.loadgen.observation import Targets
    from rpc.loadgen.wire import Failed

    try:
        settings = build(LoadSettings, values)
        _check_plot(plot)
        _check_writable("--json", json_file)
        _check_writable("--plot", plot)
        targets = Targets(ttft_target, tpot_target)
        address = server or SERVERS.get(protocol, "")
        wire = _wire(protocol, address, model, tokenizer, settings, security_of(values))
        title, prompt_seed, run = _run(wire, settings, f"{protocol} at {address}")
        asked = {"protocol": protocol, "server": address, **settings.in_force(), "prompt_seed": prompt_seed}
        result = _shown(run, targets, title, json_file != STANDARD_OUTPUT)
        unwritten = [
            *_written("--json", json_file, lambda path: _save(result, targets, asked, path)),
            *_written("--plot", plot, lambda path: _draw(run, targets, title, result, path)),
        ]
    except (ValueError, OSError, Failed) as error:
        _stop(str(error))
    if unwritten:
        _stop("\nquire: ".join(unwritten))
    if run.stopped:
        raise typer.Exit(130)
    too_many = max_error_rate is not None and result["error_rate"] > max_error_rate
    if too_many or not result["ok"]:
        raise typer.Exit(1)


def _stop(message: str) -> None:
    typer.echo(f"quire: {message}", err=True)
    raise typer.Exit(1)


def _wire(
    protocol: str, address: str, model: str, tokenizer: str | None, settings: LoadSettings, security: "Security"
) -> "Wire":
    """Returns the client of a protocol. Raises ValueError."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"--protocol is {protocol!r}, must be one of {', '.join(PROTOCOLS)}")
    if tokenizer is not None and protocol != "openai":
        raise ValueError("--tokenizer is for --protocol openai: the others have no use for it")
    if protocol == "openai":
        return _openai(address, model, tokenizer, settings, security)
    from rpc.addresses import check_server

    check_server(address)
    if protocol == "quire":
        from rpc.loadgen.native import Native

        return Native(address, model, security, settings.ignore_eos)
    from rpc.loadgen.open_inference import OpenInference

    return OpenInference(address, model, security, settings.ignore_eos)


def _openai(
    address: str, model: str, tokenizer: str | None, settings: LoadSettings, security: "Security"
) -> "Wire":  # fmt: skip
    """Returns the client of OpenAI's protocol. Raises ValueError."""
    _need("httpx", "--protocol openai", "bench")
    from model.errors import CheckpointError
    from model.inputs.tokenizer_files import load_tokenizer
    from model.inputs.trial import try_tokenizer
    from rpc.loadgen.openai_http import OpenAI
    from rpc.paths import model_directory

    if security.chain is not None:
        raise ValueError("--tls-cert is not for --protocol openai")
    if "://" not in address:
        address = f"{'https' if security.tls or security.roots else 'http'}://{address.removesuffix('/v1')}/v1"
    try:
        own = None
        if tokenizer is not None:
            directory = model_directory(tokenizer)
            try_tokenizer(directory)
            own = load_tokenizer(directory)
    except CheckpointError as error:
        raise ValueError(str(error).replace("--model", "--tokenizer")) from None
    return OpenAI(address, model, security, settings.ignore_eos, own)


def _need(library: str, what: str, extra: str) -> None:
    """Raises ValueError if a library is not installed."""
    if find_spec(library) is None:
        raise ValueError(f"{what} needs {library}, which is not installed: {how_to_install(extra)}")


def _check_plot(path: Path | None) -> None:
    """Checks --plot before the load, which may take long. Raises ValueError."""
    if path is not None:
        _need("matplotlib", "--plot", "plots")
        if path.suffix not in (".png", ".html"):
            raise ValueError(f"--plot {path} must end in .png or .html")


def _check_writable(flag: str, path: Path | None) -> None:
    """Checks before the load, which may take long, that a file can be written. Leaves files as they are.

    Raises:
        ValueError: The file cannot be written.
    """
    if path is None or path == STANDARD_OUTPUT:
        return
    target = path.resolve()  # otherwise the removal below could remove a link to the file
    is_new = not target.exists()
    if not is_new and not target.is_file():
        return  # a pipe's reader would see the end of its input
    try:
        target.open("ab").close()
        if is_new:
            target.unlink()
    except OSError as error:
        raise ValueError(_unwritten(flag, path, error)) from None


def _unwritten(flag: str, path: Path, error: OSError) -> str:
    return f"{flag} {path} cannot be written: {error.strerror or error}"


def _written(flag: str, path: Path | None, write: Callable[[Path], None]) -> list[str]:
    """Writes a file. Returns the errors as sentences, so that the other file is still written."""
    if path is None:
        return []
    try:
        write(path)
    except OSError as error:
        return [_unwritten(flag, path, error)]
    return []


def _run(wire: "Wire", settings: LoadSettings, place: str) -> tuple[str, int | None, "LoadRun"]:
    """Runs the load; returns a title, the seed of its prompts, and its result."""
    from rpc.loadgen.run import run_load

    console, titles, prompt_seed = Console(stderr=True), [place], settings.prompt_seed
    with Progress(*COLUMNS, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, running=0, failed=0, tokens=0)

        def ready(plan: "RequestPlan", served: "ServedModel", exact: bool) -> None:
            nonlocal prompt_seed
            prompt_seed = plan.prompt_seed
            bar.update(task, total=plan.total)
            titles.append(f"{served.model}, {_load(settings, plan)}, prompt seed {plan.prompt_seed}")
            if not exact:
                console.print("prompts are text: their lengths are about right, the server's counts are reported")
            if plan.shrink < 1:
                console.print(f"the trace's lengths are shrunk to {plan.shrink:.1%}, to fit the model's context")

        def look(run: "LoadRun") -> None:
            bar.update(task, refresh=True, **progress(run))

        try:
            run = asyncio.run(run_load(wire, settings, ready, look))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    return ": ".join(titles), prompt_seed, run


def progress(run: "LoadRun") -> dict[str, Any]:
    """Returns the bar's values. Its time is independent of the number of requests, since it blocks the event loop."""
    running = len(run.seen) - run.ended
    return {"completed": run.ended, "running": running, "failed": run.failed, "tokens": run.tokens}


def _load(settings: LoadSettings, plan: "RequestPlan") -> str:
    """Returns the load in words."""
    many = f"{plan.total} requests" if plan.total is not None else f"{settings.duration:g} s"
    if settings.trace is not None:
        return f"{many} of {Path(settings.trace).name}, {settings.speed or 1.0:g} times as fast"
    lengths = f"{settings.input_tokens or INPUT} in, {settings.output_tokens or OUTPUT} out"
    if settings.rate is not None:
        return f"{many}, {settings.rate:g} a second, {lengths}"
    return f"{many}, {settings.together} at a time, {lengths}"


def _shown(run: "LoadRun", targets: "Targets", title: str, on_terminal: bool) -> dict[str, Any]:
    """Computes the figures, and prints them on a terminal."""
    from rpc.loadgen.report import show
    from rpc.loadgen.summary import summary

    result = summary(run, targets)
    if on_terminal:
        show(result, title, Console())
    return result


def _save(result: dict[str, Any], targets: "Targets", asked: dict[str, Any], path: Path) -> None:
    """Writes the figures as JSON. Raises OSError."""
    text = json.dumps({"load": asked | {"ttft_target": targets.first, "tpot_target": targets.other}, **result})
    if path == STANDARD_OUTPUT:
        print(text, flush=True)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def _draw(run: "LoadRun", targets: "Targets", title: str, result: dict[str, Any], path: Path) -> None:
    """Writes the charts. Raises OSError."""
    from rpc.loadgen.plots import draw, save

    save(draw(run, targets, title), result, title, path)
