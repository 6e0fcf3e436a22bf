"""Measures how far simulated latencies are from measured ones.

A server with random weights takes one part of a trace and records it. Its steps are calibrated on that recording. Then
it takes the other part, at several rates, while clients measure; the same part is simulated. The traces are those that
ship: Azure's conversations, and Mooncake's, whose prompts share prefixes. Lengths are shrunk to the model's context.

Rates are parts of what the engine can take: the trace at which steps of the simulation fill the time is 1.

python -m bench.fidelity [--model llama-135m] [--loads 0.5,0.8,1.5]
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.figures import AsJson, show
from bench.serving import Serving, started
from bench.shapes import MODELS, write_model
from rpc.client.security import OPEN
from rpc.engines.recordings import read_recording
from rpc.loadgen.drive import LoadRun
from rpc.loadgen.native import Native
from rpc.loadgen.run import run_load
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.traces import KNOWN, Arrival, read_trace, scaled, shrink_of
from rpc.paths import demo_directory
from rpc.simulation.cluster import Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.recorded import Trace
from rpc.simulation.served import Serving as Served
from rpc.simulation.traffic import submits
from scheduler.profile import Profile

CONTEXT, REQUESTS = 2048, 100
TRACES = ("azure-conv", "mooncake")
Floats = NDArray[np.float64]


def parts(trace: str, folder: Path) -> tuple[Path, Path]:
    """Writes the first requests of a trace, and those behind them, to files of its format. Returns their paths."""
    source = KNOWN[trace]
    lines = source.read_text().splitlines(keepends=True)
    head, rows = (lines[:1], lines[1:]) if source.suffix == ".csv" else ([], lines)
    paths = folder / f"first{source.suffix}", folder / f"second{source.suffix}"
    for path, some in zip(paths, (rows[:REQUESTS], rows[REQUESTS : 2 * REQUESTS]), strict=True):
        path.write_text("".join(head + some))
    return paths


def measured(server: Serving, trace: Path, speed: float) -> LoadRun:
    """Sends a trace to a server."""
    settings = LoadSettings(trace=str(trace), speed=speed, context=CONTEXT)
    wire = Native(server.address, "", OPEN, settings.ignore_eos)
    return asyncio.run(run_load(wire, settings, lambda *_: None, lambda _: None))


def simulated(profile: Profile, arrivals: list[Arrival], speed: float) -> Served:
    """Simulates what `measured` measures."""
    fitting, shrink = scaled(arrivals, CONTEXT, speed), shrink_of(arrivals, CONTEXT)
    traffic = submits(fitting, profile.blueprint.layout.page_size, shrink)
    return Cluster(Deployment(profile.blueprint, profile.costs), traffic).run()


def full_speed(profile: Profile, arrivals: list[Arrival]) -> float:
    """Returns the factor of a trace's rate at which it comes as fast as an engine can serve it."""
    patient = replace(profile, blueprint=replace(profile.blueprint, queue=replace(profile.blueprint.queue, wait=1e9)))
    return arrivals[-1].at / simulated(patient, arrivals, 1e6).seconds


def figures(run: LoadRun, served: Served) -> dict[str, float]:
    """Returns measured and simulated percentiles in milliseconds, and by how many percent they differ."""
    done = [one for one in run.seen if one.complete]
    pairs: dict[str, tuple[Iterable[float | None], Floats]] = {
        "ttft": ([one.first for one in done], served.firsts),
        "tpot": ([one.other for one in done], served.others),
    }
    found = {"failed": float(len(run.seen) - len(done)), "failed_simulated": served.figures()["refused"]}
    for name, (seen, expected) in pairs.items():
        values = np.array([value for value in seen if value is not None])
        for percent in (50, 99):
            real, guess = (1000 * float(np.percentile(each, percent)) for each in (values, expected))
            found |= {
                f"{name}_p{percent}_ms": real,
                f"{name}_p{percent}_simulated_ms": guess,
                f"{name}_p{percent}_error_percent": 100 * (guess / real - 1),
            }
    return found


def calibrated(flags: tuple[str, ...], trace: Path, speed: float, folder: Path) -> Profile:
    """Serves a trace, and returns the profile of its recording."""
    file = folder / f"{trace.stem}.rec"
    with started(*flags, "--record", str(file)) as server:
        measured(server, trace, speed)
    return Trace.of(read_recording(file)).profile("measured")


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-135m",
    loads: Annotated[str, typer.Option(help="Rates, as parts of what the engine can take.")] = "0.5,0.8,1.5",
    as_json: AsJson = False,
) -> None:
    """Compare simulated latencies with measured ones."""
    rates = [float(load) for load in loads.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        directory = write_model(folder, MODELS[model] | {"max_position_embeddings": CONTEXT})
        shutil.copy(demo_directory() / "tokenizer.json", directory)  # prompts are sent as tokens; any will do
        flags = ("--model", str(directory), "--dtype", "bfloat16", "--max-queue-time", "600")
        for trace in TRACES:
            (made := folder / trace).mkdir()
            first, second = parts(trace, made)
            rough = calibrated(flags, first, 1e6, made)  # all at once: steps of all sizes
            print(f"{trace}: {rough.source}", file=sys.stderr)
            arrivals = read_trace(second)
            full, found = full_speed(rough, arrivals), dict[str, dict[str, float]]()
            for rate in rates:
                with started(*flags) as server:
                    run = measured(server, second, rate * full)
                found[f"load {rate:g}"] = figures(run, simulated(rough, arrivals, rate * full))
            show(f"{model}, {trace}: {REQUESTS} requests", found, as_json)


if __name__ == "__main__":
    typer.run(main)
