"""`quire simulate`, `quire plan` and `quire calibrate`: what engines would do, on a virtual clock."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rpc.cli.charts import HtmlFile, check_charts
from rpc.cli.options import build, with_settings
from rpc.cli.replay import AsJson, File, fail
from rpc.cli.tables import print_table, written
from rpc.simulation.changes import Changes
from rpc.simulation.settings import DeploymentSettings, SimulatedEngineSettings, TrafficSettings, parse_slo
from scheduler.scaling_settings import ScalingSettings

if TYPE_CHECKING:
    from rpc.simulation.planning import Trial
    from rpc.simulation.scenario import Scenario
    from rpc.simulation.tenants import TenantFigures

PANELS: dict[type, str | None] = {
    TrafficSettings: "Traffic",
    SimulatedEngineSettings: "Engines",
    Changes: "Changed settings of the engines",
}
ERRORS = (OSError, ValueError, OverflowError, MemoryError, csv.Error)  # of files that are no traces or profiles, too
TENANT_COLUMNS = {
    "requests": "requests",
    "refused": "refused",
    "output tokens": "output tokens",
    "ttft p50": "first token, s, p50",
    "ttft p99": "first token, s, p99",
    "tpot p50": "a token after it, s, p50",
    "tpot p99": "a token after it, s, p99",
}
"""Figures of a tenant, by the heading of their column."""
TRIAL_COLUMNS = ("engines", "change", "within\ntargets", "ttft\np99, s", "itl\np99, s", "prefix\nhits", "preemptions")
"""Headings of a plan's table. Those of two lines leave room for the names of changes in 80 columns."""

SLO = typer.Option(
    "--slo", show_default=False, help="Targets of a request: ttft=500ms,itl=50ms, or one of them; itl is a mean."
)


@with_settings({**PANELS, DeploymentSettings: "Deployment", ScalingSettings: "Autoscaling"})
def simulate(
    slo: Annotated[str | None, SLO] = None,
    html: HtmlFile = None,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Simulate a deployment on a trace: the scheduler, cache, router and autoscaler that serve, and a modelled clock.

    A step takes as long as the costs of the engine's profile say. Two simulations with one seed are equal.
    """
    from rpc.simulation.served import LatencyTargets, finite
    from rpc.simulation.tenants import by_tenant

    try:
        targets = LatencyTargets() if slo is None else parse_slo(slo)
        check_charts(html)
        scenario = _scenario(values, build(DeploymentSettings, values), build(ScalingSettings, values))
        cluster = scenario.cluster()
        with _waiting(f"{len(cluster.ledger.came):,} requests"):
            serving = cluster.run()
        figures = serving.figures()
        if slo is not None:
            figures["within targets"] = serving.met(targets)
        tenants = by_tenant(scenario.traffic, serving.ledger)
        if html is not None:
            from rpc.simulation.page import draw, save

            title = f"{values['trace']} on {scenario.engine}"
            tables = _rows(figures), _tenant_table(tenants), _about(scenario)
            picture = draw(serving, cluster.samples, targets, title, tenants)
            save(picture, [table for table in tables if table], title, html)
    except ERRORS as error:  # also a RecordingError
        fail(error)
    if as_json:
        about = {"engine": scenario.engine, "costs": scenario.source, "shrink": scenario.shrink}
        each = [{"tenant": one.tenant, **finite(one.figures)} for one in tenants]
        print(json.dumps({**about, "digest": serving.digest(), "figures": finite(figures), "tenants": each}))
        return
    _print_about(scenario)
    print_table(("", "simulated"), _rows(figures), (), ("simulated",))
    if tenants:
        print()
        heading, *rows = _tenant_table(tenants)
        print_table(heading, rows, (), heading[1:])


@with_settings(PANELS)
def plan(
    slo: Annotated[str, SLO],
    percentile: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Percentage of the requests that have to keep the targets.")
    ] = 99.0,
    most: Annotated[int, typer.Option(min=1, help="Engines that are tried at most.")] = 64,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Find the fewest engines that serve a trace within targets, and what other settings would change.

    Simulates twice as many engines each time until they are enough, then numbers between, then other settings.
    """
    from rpc.simulation.planning import Plan
    from rpc.simulation.served import finite

    try:
        scenario = _scenario(values)
        found = Plan(scenario, parse_slo(slo), percentile / 100, most)
        with _waiting("") as say:
            for trial in found.fewest():
                say(_said(trial))
            best = found.answer
            for trial in found.alternatives(best or most):
                say(_said(trial))
    except ERRORS as error:
        fail(error)
    if as_json:
        trials = [{**asdict(one), "figures": finite(one.figures)} for one in found.trials]
        print(json.dumps({"replicas": best, "trials": trials}))
    else:
        _print_about(scenario)
        rows = [_trial_row(one) for one in found.trials]
        print_table(TRIAL_COLUMNS, rows, ("change",), TRIAL_COLUMNS[:1] + TRIAL_COLUMNS[2:])
        print(f"\n{_verdict(best, most)} {percentile:g} % of the requests within {slo}")
    if best is None:
        raise typer.Exit(1)


def calibrate(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="File for the profile.")],
    name: Annotated[
        str | None, typer.Option(show_default=False, help="Name of the profile. Unset: that of the recording.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the costs of an engine's steps to a recording, and write them as a profile for `quire simulate`.

    The recording should have steps of all kinds: long and short prompts, few and many streams.
    """
    from rpc.engines.recordings import read_recording
    from rpc.simulation.recorded import Trace

    try:
        trace = Trace.of(read_recording(file))
        if not len(trace.errors):
            raise ValueError(f"{file}: no step was recorded")
        profile = trace.profile(name or file.name)
        output.write_text(json.dumps(profile.to_json(), indent=2) + "\n", encoding="utf-8")
    except ERRORS as error:
        fail(error)
    if as_json:
        print(json.dumps(profile.to_json()))
        return
    print(f"{output}: {profile.source}")


def _scenario(
    values: Mapping[str, Any], deployment: DeploymentSettings | None = None, scaling: ScalingSettings | None = None
) -> "Scenario":
    from rpc.simulation.scenario import scenario_of

    traffic, engines = build(TrafficSettings, values), build(SimulatedEngineSettings, values)
    return scenario_of(traffic, engines, build(Changes, values), deployment, scaling)


@contextmanager
def _waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Shows in the terminal that something goes on, and in the end what was last said of it."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda said: bar.update(task, description=said)


def _print_about(scenario: "Scenario") -> None:
    for name, value in _about(scenario):
        typer.echo(f"{name}: {value}", err=True)


def _about(scenario: "Scenario") -> list[list[str]]:
    about = [["engine", f"{scenario.engine}. {scenario.source}"]]
    if scenario.shrink < 1:
        about.append(["lengths", f"times {scenario.shrink:.3g}, so that the longest request fits the engine"])
    return about


def _rows(figures: Mapping[str, float]) -> list[list[str]]:
    return [[name, written(value)] for name, value in figures.items()]


def _tenant_table(tenants: Sequence["TenantFigures"]) -> list[list[str]]:
    """Returns a heading and a row for each tenant; nothing without tenants."""
    rows = [[one.tenant, *(written(one.figures[name]) for name in TENANT_COLUMNS.values())] for one in tenants]
    return [["tenant", *TENANT_COLUMNS], *rows] if rows else []


def _said(trial: "Trial") -> str:
    change = f", {trial.change}" if trial.change else ""
    return f"{_engines(trial.replicas)}{change}: {trial.met:.2%} within the targets"


def _engines(count: int) -> str:
    return "1 engine" if count == 1 else f"{count} engines"


def _verdict(best: int | None, most: int) -> str:
    """Returns the beginning of a plan's last sentence: the engines, and whether they serve."""
    if best is None:
        return f"{_engines(most)} {'does' if most == 1 else 'do'} not serve"
    return f"{_engines(best)} {'serves' if best == 1 else 'serve'}"


def _trial_row(trial: "Trial") -> list[str]:
    shown = "first token, s, p99", "a token after it, s, p99", "prefix hits", "preemptions"
    figures = [written(trial.figures[name]) for name in shown]
    return [str(trial.replicas), trial.change, f"{trial.met:.2%}", *figures]
