"""Replays real traffic through a server over gRPC. `make demo` runs it.

Arrivals and lengths are those of a conversation service of Azure; prompts are cut from Shakespeare's plays.
"""

import asyncio
import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.serving import Serving, serves, started
from model.config import read_config
from rpc.client.security import OPEN
from rpc.loadgen.drive import LoadRun
from rpc.loadgen.native import Native
from rpc.loadgen.observation import Targets
from rpc.loadgen.plan import RequestPlan
from rpc.loadgen.run import run_load
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.summary import summary as figures
from rpc.paths import demo_directory

DEFAULT = Serving("127.0.0.1:50051", "http://127.0.0.1:9464/metrics")
TRACE = "azure-conv"
LONG_QUEUE_TIME = ("--max-queue-time", "300")  # a slow machine falls behind, and must not refuse requests for that
SAMPLE_SECONDS = 0.1  # between two samples of the metrics


@dataclass(slots=True)
class ServerGauges:
    """The server's gauges during the replay."""

    pages_peak: float = 0.0
    usage: list[float] = field(default_factory=list)
    running_peak: float = 0.0
    waiting_peak: float = 0.0


async def replay(serving: Serving, settings: LoadSettings, bar: Progress) -> tuple[LoadRun, ServerGauges]:
    """Sends all requests at their times; returns the load's result and the server's gauges."""
    load, task = ServerGauges(), bar.add_task("", total=None, tokens=0)
    watch = asyncio.create_task(observe(serving, load))

    def ready(plan: RequestPlan, *_: object) -> None:
        bar.update(task, total=plan.total)

    def look(run: LoadRun) -> None:
        bar.update(task, completed=run.ended, tokens=run.tokens)

    run = await run_load(Native(serving.address, "", OPEN, settings.ignore_eos), settings, ready, look)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    return run, load


async def observe(serving: Serving, load: ServerGauges) -> None:
    while True:
        metrics = await asyncio.to_thread(serving.metrics)
        load.pages_peak = max(load.pages_peak, metrics["quire_kv_pages_used"])
        load.usage.append(metrics["quire_kv_cache_usage_ratio"])
        load.running_peak = max(load.running_peak, metrics["quire_num_requests_running"])
        load.waiting_peak = max(load.waiting_peak, metrics["quire_num_requests_waiting"])
        await asyncio.sleep(SAMPLE_SECONDS)


def wait_pages_free(serving: Serving, seconds: float = 10.0) -> float:
    """Waits until no page is held, at most `seconds`; returns the number of pages that still are."""
    deadline = time.monotonic() + seconds
    while (used := serving.metrics()["quire_kv_pages_used"]) and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
    return used


def summary(run: LoadRun, load: ServerGauges, targets: Targets) -> dict[str, Any]:
    """Returns the figures of `rpc.loadgen.summary`. A request with too few or too many tokens counts as lost."""
    found = figures(run, targets)
    refused = sum(seen.code.startswith("RESOURCE_EXHAUSTED") for seen in run.seen)
    ok = sum(seen.complete and not seen.short for seen in run.seen)
    return {
        "requests": len(run.seen),
        "ok": ok,
        "refused": refused,
        "lost": len(run.seen) - ok - refused,
        "errors": sorted({f"{seen.code}: {seen.message}" for seen in run.seen if seen.code}),
        "seconds": found["seconds"],
        "requests_per_second": found["requests_per_second"],
        "prompt_tokens_per_second": found["input_tokens_per_second"],
        "generated_tokens_per_second": found["output_tokens_per_second"],
        "time_to_first_token_ms": found["ttft_ms"],
        "inter_token_latency_ms": found["itl_ms"],
        "met_latency_targets": found["goodput"],
        "kv_pages_peak": int(load.pages_peak),
        "kv_usage_peak": round(max(load.usage, default=0.0), 4),
        "kv_usage_mean": round(float(np.mean(load.usage)) if load.usage else 0.0, 4),
        "running_peak": int(load.running_peak),
        "waiting_peak": int(load.waiting_peak),
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Replay of Azure's conversation trace", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key, value in result.items():
        if isinstance(value, dict):
            value = "  ".join(f"{name} {number}" for name, number in value.items())
        elif isinstance(value, list):
            value = "\n".join(value) or "none"
        table.add_row(key.replace("_", " "), str(value))
    console.print(table)


def main(
    server: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a running server of the demo model. Unset: the one of `make serve` if it runs, else a "
            "new one.",
            show_default=False,
        ),
    ] = None,
    metrics: Annotated[str, typer.Option(help="Address of the server's metrics.")] = DEFAULT.metrics_url,
    ray: Annotated[bool, typer.Option("--ray", help="Start a server with its engine in a Ray actor.")] = False,
    requests: Annotated[int, typer.Option(min=1, max=200, help="Requests of the trace.")] = 200,
    speed: Annotated[float, typer.Option(min=0.01, help="Factor of the arrivals' rate.")] = 2.0,
    ttft: Annotated[float, typer.Option(help="Target for a request's first token, in seconds.")] = 10.0,
    tpot: Annotated[float, typer.Option(help="Target for each other token of a request on average.")] = 0.5,
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fail if a smaller share of the requests meets both targets.")
    ] = 0.0,
    json_output: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Replay real traffic through a server.

    Fails if a request is lost or refused, if a KV page stays held, or if too few requests meet the targets of latency.
    """
    console = Console(stderr=True)
    place: AbstractContextManager[Serving]
    if server is not None:
        place = nullcontext(Serving(server, metrics))
    elif not ray and serves(DEFAULT.metrics_url, "quire-demo"):
        place = nullcontext(DEFAULT)
    else:
        console.print("starting a server" + (" with its engine in a Ray actor" if ray else ""))
        place = started(*LONG_QUEUE_TIME, *(["--ray"] if ray else []))
    context = read_config(demo_directory()).context
    settings = LoadSettings(trace=TRACE, speed=speed, requests=requests, context=context)
    try:
        targets = Targets(ttft, tpot)
    except ValueError as error:
        raise typer.BadParameter(str(error).replace("-target", "")) from None
    with place as serving:
        console.print(f"replaying {requests} requests to {serving.address}")
        before = serving.metrics()
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            run, load = asyncio.run(replay(serving, settings, bar))
        result = summary(run, load, targets)
        result["kv_pages_held_at_the_end"] = int(wait_pages_free(serving))
        result["preemptions"] = int(
            serving.metrics()["quire_num_preemptions_total"] - before["quire_num_preemptions_total"]
        )
    if json_output:
        print(json.dumps(result))
    else:
        show(result, Console())
    late = result["met_latency_targets"] < share
    if result["ok"] != requests or result["kv_pages_held_at_the_end"] or late:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
