"""Measures how far simulated latencies are from measured ones.

A server with random weights takes one part of a trace and records it: few requests at a time, all at once, then at a
pace. Its steps are calibrated on that recording. Then it takes the other part, at several rates, while clients
measure; the same part is simulated. The traces are those that ship: Azure's conversations, and Mooncake's, whose
prompts share prefixes. Lengths are shrunk to a context, and further where the simulation says that the loads would
take longer than the run may.

Rates are parts of what the engine can take: the trace at which steps of the simulation fill the time is 1.

A machine is seldom as fast in one minute as in another. Each load is recorded too, so that it is known how long its own
steps took, as a factor of the calibrated costs. A second row of the load is simulated with costs times that factor.

python -m bench.fidelity [--model llama-135m] [--loads 0.5,0.8,1.5] [--minutes 15] [--json FILE]
"""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from bench.fidelity_rows import CASES, Case, Report, Row, header, write_arrivals
from bench.serving import Serving, started
from bench.shapes import MODELS, write_model
from rpc.client.security import OPEN
from rpc.engines.recordings import read_recording
from rpc.loadgen.drive import LoadRun
from rpc.loadgen.native import Native
from rpc.loadgen.run import run_load
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.traces import Arrival, scaled, shrink_of
from rpc.paths import demo_directory
from rpc.simulation.cluster import Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.recorded import Trace
from rpc.simulation.served import Serving as Served
from rpc.simulation.traffic import submits
from scheduler.profile import Profile

LEAST_CONTEXT = 64  # tokens: below, most outputs have one token, and no TPOT
SERVER_SECONDS = 12.0  # to start and end a server
MARGIN = 0.9  # of the time that is planned for: loads may take longer than simulated
WARM_UP = 4  # requests before the measured ones: the first steps of a server are slow
AT_A_TIME = (1, 2, 3, 1)  # requests of the first loads of a calibration: steps of the fewest rows
WARM_UP_CALIBRATING = 20  # up to 8 at a time: steps of few rows, which requests that come all at once hardly have
PACE = 0.7  # of what the engine can take: steps with the prefill of one or two prompts
QUEUE_SECONDS = 600
LOOK_SECONDS = 15.0  # between two lines of progress
ALL_AT_ONCE = 1e6
"""Factor of a trace's rate at which its requests come together, so that there are steps of all sizes."""


class Cut(Exception):
    """A person stopped the load: its requests do not count."""


class Bench:
    """Serves, records and simulates traces with one model.

    Args:
        flags: Of each server.
        folder: For files of the run.
    """

    def __init__(self, flags: tuple[str, ...], folder: Path) -> None:
        self._flags, self._folder = flags, folder

    def calibrate(self, arrivals: list[Arrival], context: int) -> Profile:
        """Serves requests few at a time, all at once, and at a pace. Returns the recording's profile. Raises Cut."""
        file = self._folder / "calibration.rec"
        file.unlink(missing_ok=True)
        with started(*self._flags, "--record", str(file)) as server:
            for few in AT_A_TIME:
                self._load(server, arrivals[:1], context, ALL_AT_ONCE, few)
            self._load(server, arrivals, context, ALL_AT_ONCE, WARM_UP_CALIBRATING)
            most = full_speed(Trace.of(read_recording(file)).profile("at once"), arrivals, context)
            self._load(server, arrivals, context, PACE * most, WARM_UP)
        return Trace.of(read_recording(file)).profile("measured")

    def measure(self, arrivals: list[Arrival], context: int, speed: float) -> tuple[LoadRun, Trace]:
        """Serves requests at a factor of their rate. Returns what clients saw, and the recording. Raises Cut."""
        file = self._folder / "load.rec"
        file.unlink(missing_ok=True)
        with started(*self._flags, "--record", str(file)) as server:
            run = self._load(server, arrivals, context, speed, WARM_UP)
        return run, Trace.of(read_recording(file))

    def _load(self, server: Serving, arrivals: list[Arrival], context: int, speed: float, warm_up: int) -> LoadRun:
        trace = write_arrivals(self._folder / "arrivals.jsonl", arrivals)
        settings = LoadSettings(trace=str(trace), speed=speed, context=context, warm_up=warm_up)
        wire, due = Native(server.address, "", OPEN, settings.ignore_eos), time.monotonic() + LOOK_SECONDS

        def look(run: LoadRun) -> None:
            nonlocal due
            if (now := time.monotonic()) >= due:
                due = now + LOOK_SECONDS
                say(f"  {run.ended} of {len(arrivals)} requests have ended after {now - run.begin:.0f} s")

        run = asyncio.run(run_load(wire, settings, lambda *_: None, look))
        if run.stopped:
            raise Cut
        return run


def simulate(profile: Profile, arrivals: list[Arrival], context: int, speed: float) -> Served:
    """Simulates what `Bench.measure` measures."""
    fitting, shrink = scaled(arrivals, context, speed), shrink_of(arrivals, context)
    traffic = submits(fitting, profile.blueprint.layout.page_size, shrink)
    return Cluster(Deployment(profile.blueprint, profile.costs), traffic).run()


def full_speed(profile: Profile, arrivals: list[Arrival], context: int) -> float:
    """Returns the factor of a trace's rate at which it comes as fast as an engine can serve it."""
    patient = replace(profile, blueprint=replace(profile.blueprint, queue=replace(profile.blueprint.queue, wait=1e9)))
    return arrivals[-1].at / simulate(patient, arrivals, context, ALL_AT_ONCE).seconds


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A load to measure: tokens of the longest request, factor of the trace's rate, and what the simulation says."""

    context: int
    speed: float
    served: Served


def plan(
    profile: Profile, arrivals: list[Arrival], loads: Sequence[float], context: int, seconds: float
) -> dict[float, Planned]:
    """Returns what is to measure for each load, with the largest context up to `context` found to fit `seconds`."""
    while True:
        full = full_speed(profile, arrivals, context)
        planned = {
            load: Planned(context, load * full, simulate(profile, arrivals, context, load * full)) for load in loads
        }
        total = sum(one.served.seconds for one in planned.values())
        if total <= seconds or context <= LEAST_CONTEXT:
            return planned
        context = max(LEAST_CONTEXT, min(context - 1, int(context * max(0.0, seconds) / total)))


def compare(
    bench: Bench, case: Case, loads: Sequence[float], requests: int, context: int, report: Report, seconds: float
) -> None:
    """Calibrates on a case, and adds a row for each load to the report. Raises Cut.

    Args:
        bench: Serves the loads.
        case: The trace.
        loads: Rates, as parts of what the engine can take.
        requests: Measured requests of each load.
        context: Most tokens that the longest request is shrunk to.
        report: Gets the rows.
        seconds: Time that the case should take.
    """
    end = time.monotonic() + seconds
    first, second = case.parts(requests)
    say(f"{case.trace}: calibration with {len(first)} requests")
    profile = bench.calibrate(first, context)
    left = end - time.monotonic() - len(loads) * SERVER_SECONDS
    planned = plan(profile, second, loads, context, MARGIN * left)
    report.calibrated(case.trace, len(first), profile.source)
    for load, one in planned.items():
        say(f"{case.trace}, load {load:g}: {requests} requests, context {one.context}, {one.served.seconds:.0f} s")
        run, trace = bench.measure(second, one.context, one.speed)
        slowness = trace.slowness(profile.costs)
        slowed = replace(profile, costs=profile.costs.faster(1 / slowness))
        for factor, served in ((1.0, one.served), (slowness, simulate(slowed, second, one.context, one.speed))):
            row = Row.of(case.trace, load, one.context, run, served, factor)
            report.add(row)
            print(row.markdown(), flush=True)


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-135m",
    loads: Annotated[str, typer.Option(help="Rates, as parts of what the engine can take.")] = "0.5,0.8,1.5",
    requests: Annotated[int, typer.Option(help="Measured requests of each trace and load.", min=2)] = 160,
    context: Annotated[int, typer.Option(help="Most tokens of the longest request.", min=LEAST_CONTEXT)] = 512,
    minutes: Annotated[float, typer.Option(help="About how long all takes; shrinks the context.", min=0)] = 14.0,
    file: Annotated[Path | None, typer.Option("--json", help="Has all rows so far, whenever the run ends.")] = None,
) -> None:
    """Compare simulated latencies with measured ones.

    Takes at most about --minutes. Each row is printed when it is known; Ctrl-C keeps those that are.
    """
    rates = [float(load) for load in loads.split(",")]
    begin = time.monotonic()
    report = Report(file, {"model": model, "most_context": context, "warm_up": WARM_UP})
    print(f"{model}, {requests} requests a row; simulated / measured (error)\n\n{header()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = write_model(Path(temporary), MODELS[model] | {"max_position_embeddings": context})
        shutil.copy(demo_directory() / "tokenizer.json", directory)  # prompts are sent as tokens; any will do
        flags = ("--model", str(directory), "--dtype", "bfloat16", "--max-queue-time", str(QUEUE_SECONDS))
        bench = Bench(flags, Path(temporary))
        try:
            for i, case in enumerate(CASES):
                seconds = (begin + 60 * minutes - time.monotonic()) / (len(CASES) - i)
                compare(bench, case, rates, requests, context, report, seconds)
            report.whole = True
        except (Cut, KeyboardInterrupt):
            print("\nCut: rows are missing.")
    report.facts["seconds"] = time.monotonic() - begin
    report.save()
    print(f"\n{report.summary()}")
    if not report.whole:
        raise typer.Exit(1)


def say(line: str) -> None:
    """Reports progress, beside the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
