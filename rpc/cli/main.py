"""The `quire` command and its subcommands. Imports torch only in commands that need it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache_manager.settings import CacheSettings
from model.settings import ModelSettings, SimulationSettings
from rpc.cli.admin import admin
from rpc.cli.batch import batch
from rpc.cli.bench import bench
from rpc.cli.cache_sim import cache_sim
from rpc.cli.chat import chat
from rpc.cli.cluster import cluster
from rpc.cli.defaults import on_command_line
from rpc.cli.explain import explain
from rpc.cli.gateway import gateway
from rpc.cli.generate import generate
from rpc.cli.models import models
from rpc.cli.options import Config, build, parse_size, with_settings
from rpc.cli.profile_defaults import with_profile
from rpc.cli.replay import replay
from rpc.cli.simulate import calibrate, plan, simulate
from rpc.cli.top import top
from rpc.distribution import own_version
from rpc.frontend.settings import FrontendSettings
from rpc.observe.settings import ObserveSettings
from rpc.settings import (
    EngineSettings,
    JoinedSettings,
    JoinSettings,
    ListenSettings,
    ServerSettings,
    SharingSettings,
)
from scheduler.scaling_settings import ScalingSettings
from scheduler.settings import (
    ImageLimits,
    QueueLimits,
    RecordSettings,
    RequestLimits,
    SchedulerSettings,
)

if TYPE_CHECKING:
    from rpc.access.authentication import AuthenticationInterceptor
    from rpc.frontend.frontend import Frontend
    from rpc.server import Dashboard

app = typer.Typer(
    help="Quire serves language models from a paged KV cache, with continuous batching, over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands below take it from here
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="The flags of serve, frontend, gateway, batch and estimate can also stand in a TOML file (--config) or, "
    "with less precedence, in the environment: --page-size as QUIRE_PAGE_SIZE.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {own_version()}")
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
        ObserveSettings: "Logs and traces",
        RecordSettings: "Flight recorder",
        SimulationSettings: "Simulated engines",
    }
)
def serve(context: typer.Context, config: Config = None, **given: Any) -> None:
    """Serve a model over gRPC until SIGTERM, which drains: running requests end, new ones are refused."""

    def run() -> None:
        import asyncio

        from rpc.server import serve as serve_own

        values = with_profile(context, given)
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
            observe=build(ObserveSettings, values),
            record=build(RecordSettings, values),
            simulation=build(SimulationSettings, values),
        )
        asyncio.run(serve_own(settings, _announce, partial(_make_dashboard, record=settings.record.file)))

    _serve(run, given["log_format"])


@app.command()
@with_settings(
    {
        JoinSettings: None,
        ListenSettings: "Addresses",
        FrontendSettings: "Times and clients",
        RequestLimits: "Most that one request may ask for",
        ImageLimits: "Images",
        ObserveSettings: "Logs and traces",
    }
)
def frontend(
    model: Annotated[str, typer.Option(help="The server's own --model.")] = "demo",
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests. Unset: the directory's.", show_default=False)
    ] = None,
    config: Config = None,
    **values: Any,
) -> None:
    """Serve with the engines of a running `quire serve` that has a --join-address.

    So a server answers more clients than one process can, and clients go on here if that process ends.
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
            observe=build(ObserveSettings, values),
        )
        asyncio.run(serve_joined(settings, _announce, _make_dashboard))

    _serve(run, values["log_format"])


def _announce(line: str) -> None:
    print(f"quire: {line}", flush=True)


def _make_dashboard(
    frontend: "Frontend", authentication: "AuthenticationInterceptor", record: str | None = None
) -> "Dashboard":
    from rpc.web.process import DashboardServer  # loads starlette and uvicorn, only for a server with a dashboard

    return DashboardServer(frontend, authentication, record)


def _serve(run: Callable[[], None], form: str) -> None:
    """Runs a server. Prints a failure to start as one line, and exits with status 1."""
    from model.errors import CheckpointError
    from rpc.engines.process import EngineStartError
    from rpc.frontend.errors import RequestFailed
    from rpc.observe.logs import set_up_logging

    set_up_logging(form)
    try:
        run()
    except (CheckpointError, EngineStartError, RequestFailed, ValueError, OSError, MemoryError) as error:
        _stop(error)


app.command()(gateway)
app.command()(generate)
app.command()(chat)
app.command()(models)
app.command()(top)


GPU_FLAGS = "gpu_memory_utilization", "tensor_parallel", "backend", "max_sequences", "max_batched_tokens"
GPU_BACKENDS = "auto", "triton", "flashinfer"


@app.command()
def estimate(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model directory, GGUF file, a name on the hub, or `demo`.")] = "demo",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="KV in auto (as --dtype), one of these, int8 or fp8.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="Format of the weights: int8 or int4. Unset: none.")] = None,
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
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default=False,
            help="Estimate for a GPU with so many bytes, such as 24GiB, which need not be here: its steps, graphs and "
            "sampler, and the KV that they leave room for. Unset: for this machine's memory.",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="With --gpu-memory: part of it that the engine may use.")
    ] = 0.9,
    tensor_parallel: Annotated[
        int, typer.Option(help="With --gpu-memory: GPUs that compute the model together; sizes are of each.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(help="With --gpu-memory: auto, triton or flashinfer, as `serve` has them.")
    ] = "auto",
    max_sequences: Annotated[int, typer.Option(help="With --gpu-memory: sequences that run at once.")] = 256,
    max_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="With --gpu-memory: most tokens of a step. Unset: as `serve` chooses it for such a GPU.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    config: Config = None,
) -> None:
    """Compute the memory of a model's KV cache and weights: bytes a token, pages, sequences that fit.

    Loads no weights, and needs no GPU to estimate for one.
    """
    from model.errors import CheckpointError
    from model.simulated.naming import is_simulated
    from rpc.cli.estimate import Gpu, show
    from rpc.paths import model_directory

    try:
        if is_simulated(model):
            raise ValueError(f"--model {model} is simulated: its profile says how many pages it has")
        if gpu_memory is not None and on_command_line(context, ("kv_cache_memory",)):
            if on_command_line(context, ("gpu_memory",)):
                raise ValueError("--gpu-memory says what is left for KV: it takes no --kv-cache-memory")
            gpu_memory = None
        if gpu_memory is None and (given := on_command_line(context, GPU_FLAGS)):
            raise ValueError(f"--{given[0].replace('_', '-')} is of a GPU: it needs --gpu-memory")
        if gpu_memory is not None and gpu_memory < 1:
            raise ValueError(f"--gpu-memory is {gpu_memory} bytes, must be at least 1")
        if gpu_memory is not None and backend not in GPU_BACKENDS:
            raise ValueError(f"--backend is {backend!r}: with --gpu-memory it must be one of {', '.join(GPU_BACKENDS)}")
        of_gpu: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel": tensor_parallel,
            "backend": backend,
        }
        settings = ModelSettings(
            model,
            dtype=dtype,
            page_size=page_size,
            kv_cache_memory=kv_cache_memory,
            kv_cache_dtype=kv_cache_dtype,
            quantization=quantization,
            **({} if gpu_memory is None else of_gpu),
        )
        gpu = None
        if gpu_memory is not None:
            scheduler = SchedulerSettings(max_batched_tokens=max_batched_tokens, max_sequences=max_sequences)
            gpu = Gpu(gpu_memory, scheduler)
        show(model_directory(model), settings, length, json, gpu)
    except (CheckpointError, ValueError) as error:
        _stop(error)


app.command()(batch)
app.command()(cache_sim)
app.command()(replay)
app.command()(explain)
app.command()(simulate)
app.command()(plan)
app.command()(calibrate)
app.add_typer(admin, name="admin")
app.add_typer(bench, name="bench")
app.add_typer(cluster, name="cluster")


def _stop(error: BaseException) -> None:
    typer.echo(f"quire: {error}", err=True)
    raise typer.Exit(1)


def main() -> None:
    """Runs the command line."""
    app()
