"""`quire batch`: runs a file of requests, and writes a file of results."""

import asyncio
import logging
import sys
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cache_manager.settings import CacheSettings
from model.settings import ModelSettings
from rpc.addresses import check_server
from rpc.cli.connection import ConnectionOptions, said, security_of
from rpc.cli.defaults import on_command_line
from rpc.cli.options import Config, build, parameter_of, with_settings
from rpc.settings import EngineSettings, ServerSettings
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings

if TYPE_CHECKING:
    from rpc.batch.failures import Failures
    from rpc.client.security import Security

LINES_FAILED = 3
"""Exit status of a complete job with failed lines."""


@with_settings(
    {
        ModelSettings: None,
        EngineSettings: "Engine",
        SchedulerSettings: "Scheduling",
        CacheSettings: "Prefix cache",
        ConnectionOptions: "With --server",
    }
)
def batch(
    context: typer.Context,
    input_path: Annotated[
        Path, typer.Option("--input", exists=True, dir_okay=False, help="JSON lines, one request each.")
    ],
    output_path: Annotated[
        Path,
        typer.Option("--output", dir_okay=False, help="JSON lines, one result each. If it exists, the job goes on."),
    ],
    server: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a running `quire serve` that runs the job, in place of --model.", show_default=False
        ),
    ] = None,
    allow_errors: Annotated[
        bool, typer.Option("--allow-errors", help=f"Exit with 0 instead of {LINES_FAILED} if lines failed.")
    ] = False,
    config: Config = None,
    **values: Any,
) -> None:
    """Run a file of requests and write their results in the same order.

    A line is an object with "id", "prompt" or "prompt_token_ids" or "messages", "images", "sampling", "stopping",
    "output", the last three with the field names of the API. An image is base64, or a file beside the input. Or all
    lines are those of OpenAI's Batch API, and so are the results: "custom_id", "method", "url", "body". A line
    that is no request, or fails, gets a line with its "error", and the command exits with 3. After a stop the same
    command goes on.
    """
    from model.errors import CheckpointError
    from rpc.batch.retries import JobStoppedError
    from rpc.client.errors import QuireError
    from rpc.engines.process import EngineStartError
    from rpc.frontend.errors import RequestFailed

    if server is not None:
        others = {parameter_of(option) for option in fields(ConnectionOptions)}
        server = _refuse_engine_flags(context, server, [name for name in values if name not in others])
    logging.basicConfig(level=logging.WARNING, format="quire: %(message)s", stream=sys.stderr)
    try:
        if server is not None:
            check_server(server)
        settings = ServerSettings(
            model=build(ModelSettings, values),
            engine=build(EngineSettings, values),
            scheduler=build(SchedulerSettings, values),
            queue=NO_QUEUE_LIMITS,
            cache=build(CacheSettings, values),
        )
        failures = asyncio.run(_run(input_path, output_path, server, settings, security_of(values)))
    except KeyboardInterrupt:
        _say(f"stopped. The same command goes on from what is in {output_path}")
        raise typer.Exit(130) from None
    except JobStoppedError as error:
        _say(f"{error}. The same command goes on from what is in {output_path}")
        raise typer.Exit(1) from None
    except QuireError as error:
        _say(f"{said(error)}. The same command goes on from what is in {output_path}")
        raise typer.Exit(1) from None
    except (CheckpointError, EngineStartError, RequestFailed, ValueError, OSError, MemoryError) as error:
        _say(str(error))
        raise typer.Exit(1) from None
    if failures.count:
        _say(f'lines that failed: {failures.count}, each with its "error" in {output_path}; ids: {failures}')
        if not allow_errors:
            raise typer.Exit(LINES_FAILED)


def _refuse_engine_flags(context: typer.Context, server: str, flags: list[str]) -> str | None:
    """Returns the server to use, and refuses flags of an engine beside it.

    Engine flags on the command line win over a --server of the file or the environment: then it returns None.
    """
    given = on_command_line(context, ("server", *flags))
    if "server" not in given:
        return None if given else server
    if given != ["server"]:
        names = ", ".join("--" + flag.replace("_", "-") for flag in given if flag != "server")
        raise typer.BadParameter(f"--server has an engine of its own: leave --server out, or {names}")
    return server


def _say(message: str) -> None:
    typer.echo(f"quire: {message}", err=True)


async def _run(
    input_path: Path, output_path: Path, server: str | None, settings: ServerSettings, security: "Security"
) -> "Failures":
    """Runs the job to its end, and returns the failed lines, those of earlier runs included."""
    from rpc.batch.forms import read_lines
    from rpc.batch.job import JobCounts, count_lines, run_job
    from rpc.batch.results import OutputFile
    from rpc.batch.retries import RetryPolicy
    from rpc.batch.runners import RequestRunner, local_runner, server_runner

    if not input_path.is_file() or (output_path.exists() and output_path.samefile(input_path)):
        raise ValueError(f"--input {input_path} must be a regular file, and not the output: it is read more than once")
    policy = RetryPolicy()
    with OutputFile(output_path) as results:
        before = results.resume(read_lines(input_path))
        counts = JobCounts(count_lines(input_path), before, results.failures)
        if counts.before == counts.lines:
            results.complete()
            _say(f"nothing to do: {output_path} has all {counts.lines} results")
            return counts.failures
        if counts.before:
            _say(f"going on: {counts.before} of {counts.lines} results are there")
        runner: AbstractAsyncContextManager[RequestRunner]
        runner = local_runner(settings) if server is None else server_runner(server, policy, security)
        began = time.monotonic()
        async with runner as ready:
            with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
                task = bar.add_task("", total=counts.lines, completed=counts.before, tokens=0, errors=0)

                def show(now: JobCounts) -> None:
                    bar.update(task, completed=now.done, tokens=now.completion_tokens, errors=now.errors)

                await run_job(input_path, results, ready, policy, counts, show)
        rate = counts.completion_tokens / (time.monotonic() - began)
        _say(
            f"{counts.results} results and {counts.errors} errors, {counts.prompt_tokens} prompt + "
            f"{counts.completion_tokens} generated tokens, {rate:.0f} tokens/s, in {output_path}"
        )
        return counts.failures


COLUMNS = (
    MofNCompleteColumn(),
    BarColumn(),
    TextColumn("{task.fields[tokens]} tokens, {task.fields[errors]} errors"),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)
