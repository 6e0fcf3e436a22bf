"""`quire bench serve`: a load on a running server, and what its clients saw."""

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
    from rpc.loadgen.drive import Run
    from rpc.loadgen.plan import Plan
    from rpc.loadgen.seen import Targets
    from rpc.loadgen.wire import Served, Wire

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
            help="HOST:PORT; of openai http://HOST:PORT/v1. Unset: here, at its usual port.", show_default=False
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Its name; unset: the only one.", show_default=False)] = "",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The model's directory, or name on the hub, for openai: prompts of exactly so many tokens.",
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
        typer.Option(min=0.0, max=1.0, help="A larger share of failed requests ends with 1.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the figures there; - is standard output.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw them: FILE.png or FILE.html. Needs matplotlib.")
    ] = None,
    **values: Any,
) -> None:
    """Put a load on a running server and say what its clients saw: latencies, throughput, goodput, errors.

    Latencies of an open loop (--rate, --trace) count from when a request should have been sent, not from when it was:
    a server that stalls is charged for all that came meanwhile. Ctrl-C shows what there is.
    """
    from rpc.loadgen.seen import Targets
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
    """Raises ValueError."""
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
    """Raises ValueError."""
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
    """Raises ValueError where it is not installed."""
    if find_spec(library) is None:
        raise ValueError(f"{what} needs {library}, which is not installed: {how_to_install(extra)}")


def _check_plot(path: Path | None) -> None:
    """Before the load, not after it. Raises ValueError."""
    if path is not None:
        _need("matplotlib", "--plot", "plots")
        if path.suffix not in (".png", ".html"):
            raise ValueError(f"--plot {path} must end in .png or .html")


def _check_writable(flag: str, path: Path | None) -> None:
    """Before the load, which may take long and cannot be had again. Leaves files as they are. Raises ValueError."""
    if path is None or path == STANDARD_OUTPUT:
        return
    target = path.resolve()  # else what is removed again may be a link to it
    is_new = not target.exists()
    if not is_new and not target.is_file():
        return  # of a pipe the other end would see a writer come and go
    try:
        target.open("ab").close()
        if is_new:
            target.unlink()
    except OSError as error:
        raise ValueError(_unwritten(flag, path, error)) from None


def _unwritten(flag: str, path: Path, error: OSError) -> str:
    return f"{flag} {path} cannot be written: {error.strerror or error}"


def _written(flag: str, path: Path | None, write: Callable[[Path], None]) -> list[str]:
    """Why not, if it could not be."""
    if path is None:
        return []
    try:
        write(path)
    except OSError as error:
        return [_unwritten(flag, path, error)]
    return []


def _run(wire: "Wire", settings: LoadSettings, place: str) -> tuple[str, int | None, "Run"]:
    """A title for it, the seed of its prompts, and what came of it."""
    from rpc.loadgen.run import run_load

    console, titles, prompt_seed = Console(stderr=True), [place], settings.prompt_seed
    with Progress(*COLUMNS, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, running=0, failed=0, tokens=0)

        def ready(plan: "Plan", served: "Served", exact: bool) -> None:
            nonlocal prompt_seed
            prompt_seed = plan.prompt_seed
            bar.update(task, total=plan.total)
            titles.append(f"{served.model}, {_load(settings, plan)}, prompt seed {plan.prompt_seed}")
            if not exact:
                console.print("prompts are text: their lengths are about right, the server's counts are reported")
            if plan.shrink < 1:
                console.print(f"the trace's lengths are shrunk to {plan.shrink:.1%}, to fit the model's context")

        def look(run: "Run") -> None:
            bar.update(task, refresh=True, **progress(run))

        try:
            run = asyncio.run(run_load(wire, settings, ready, look))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    return ": ".join(titles), prompt_seed, run


def progress(run: "Run") -> dict[str, Any]:
    """What the bar shows. Takes as long for many requests as for few: it holds up the event loop."""
    running = len(run.seen) - run.ended
    return {"completed": run.ended, "running": running, "failed": run.failed, "tokens": run.tokens}


def _load(settings: LoadSettings, plan: "Plan") -> str:
    """In words."""
    many = f"{plan.total} requests" if plan.total is not None else f"{settings.duration:g} s"
    if settings.trace is not None:
        return f"{many} of {Path(settings.trace).name}, {settings.speed or 1.0:g} times as fast"
    lengths = f"{settings.input_tokens or INPUT} in, {settings.output_tokens or OUTPUT} out"
    if settings.rate is not None:
        return f"{many}, {settings.rate:g} a second, {lengths}"
    return f"{many}, {settings.together} at a time, {lengths}"


def _shown(run: "Run", targets: "Targets", title: str, on_terminal: bool) -> dict[str, Any]:
    """The figures, which are shown too."""
    from rpc.loadgen.report import show
    from rpc.loadgen.summary import summary

    result = summary(run, targets)
    if on_terminal:
        show(result, title, Console())
    return result


def _save(result: dict[str, Any], targets: "Targets", asked: dict[str, Any], path: Path) -> None:
    """Raises OSError."""
    text = json.dumps({"load": asked | {"ttft_target": targets.first, "tpot_target": targets.other}, **result})
    if path == STANDARD_OUTPUT:
        print(text, flush=True)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def _draw(run: "Run", targets: "Targets", title: str, result: dict[str, Any], path: Path) -> None:
    """Raises OSError."""
    from rpc.loadgen.plots import draw, save

    save(draw(run, targets, title), result, title, path)
