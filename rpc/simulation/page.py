"""A simulation as one HTML file: figures and charts. Needs matplotlib, the extra `plots`."""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rpc.simulation.cluster import COLUMNS
from rpc.simulation.served import LatencyTargets, Serving
from rpc.simulation.tenants import PERCENTILES, TPOT, TTFT, TenantFigures

SHOWN = 99.5  # percentile of latencies at which axes end: a few would leave no room for the others
COLOURS = ("#1f5fa8", "#c8641e", "#3a8a4d")

Floats = NDArray[np.float64]


def draw(
    serving: Serving,
    samples: Sequence[tuple[float, ...]],
    targets: LatencyTargets,
    title: str,
    tenants: Sequence[TenantFigures] = (),
) -> Figure:
    """Draws latencies, the state of the deployment over time, and the latencies of tenants.

    Args:
        serving: How requests were served.
        samples: Rows of `COLUMNS`.
        targets: Latencies that are marked.
        title: Title of the figure.
        tenants: Figures by tenant; nothing is drawn of them where there are none.
    """
    rows = 4 if tenants else 3
    figure = Figure(figsize=(11, 10 / 3 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)  # the name of a file may have two dollar signs
    panels = figure.subplots(rows, 2).flat
    _shares(panels[0], {"TTFT": serving.firsts}, targets.ttft)
    _shares(panels[1], {"ITL": serving.ledger.gaps, "TPOT": serving.others}, targets.itl)
    over = dict(zip(COLUMNS, np.array(samples, np.float64).reshape(-1, len(COLUMNS)).T, strict=True))
    seconds = over["seconds"] - (over["seconds"][0] if len(over["seconds"]) else 0.0)
    _lines(panels[2], seconds, {name: over[name] for name in ("running", "waiting")}, "requests")
    _lines(panels[3], seconds, {"engines": over["engines"]}, "engines")
    shares = {"KV pages in use": over["pages in use"], "prefix hits so far": over["prefix hits"]}
    _lines(panels[4], seconds, shares, "share")
    _lines(panels[5], seconds, {"preemptions so far": over["preemptions"]}, "preemptions")
    if tenants:
        _bars(panels[6], tenants, TTFT, "TTFT by tenant")
        _bars(panels[7], tenants, TPOT, "TPOT by tenant")
    return figure


def _shares(axes: Axes, latencies: Mapping[str, Floats], target: float | None) -> None:
    """Draws empirical distributions of latencies."""
    ends = list[float]()
    for (name, values), colour in zip(latencies.items(), COLOURS, strict=False):
        if len(values):
            axes.plot(*_steps(1000 * values), label=name, color=colour)
            ends.append(1000 * float(np.percentile(values, SHOWN)))
    if target is not None:
        axes.axvline(1000 * target, color="grey", linestyle="--", label="target")
        ends.append(1000 * target)
    axes.set(xlabel="milliseconds", ylabel="share", xlim=(0, 1.1 * max(ends, default=1.0) or 1.0), ylim=(0, 1))
    axes.set_title(" and ".join(latencies))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def _steps(values: Floats) -> tuple[Floats, Floats]:
    """Returns points of a distribution, few enough for a file: its quantiles."""
    shares = np.linspace(0, 1, 501)
    return np.quantile(values, shares), shares


def _lines(axes: Axes, seconds: Floats, lines: Mapping[str, Floats], unit: str) -> None:
    for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(seconds, values, label=name, color=colour)
    axes.set(xlabel="seconds", ylabel=unit, ylim=(0, None))
    axes.legend(loc="best")


def _bars(axes: Axes, tenants: Sequence[TenantFigures], latency: str, title: str) -> None:
    """Draws percentiles of a latency of each tenant. One that is not known has no bar."""
    places, height = np.arange(len(tenants)), 0.8 / len(PERCENTILES)
    for i, (percent, colour) in enumerate(zip(PERCENTILES, COLOURS, strict=False)):
        values = [1000 * one.figures[f"{latency}, p{percent}"] for one in tenants]
        axes.barh(places + (i - (len(PERCENTILES) - 1) / 2) * height, values, height, label=f"p{percent}", color=colour)
    axes.set_yticks(places, [one.tenant for one in tenants], parse_math=False)
    axes.invert_yaxis()  # the largest tenant is at the top
    axes.set(xlabel="milliseconds", xlim=(0, None))
    axes.set_title(title)
    axes.legend(loc="best")


def save(figure: Figure, tables: Sequence[Sequence[Sequence[str]]], title: str, path: Path) -> None:
    """Writes the figure, and tables below it, as one file that needs no other.

    Raises:
        OSError: The file cannot be written.
    """
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    picture, name = svg[svg.index("<svg") :], html.escape(title)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>'
        "body{font:15px sans-serif;max-width:75em;margin:2em auto}svg{width:100%;height:auto}"
        "td{padding:.15em 1em;text-align:right}td:first-child{text-align:left}table{margin:1em 0}"
        f"</style></head><body>\n{picture}\n{''.join(map(_table, tables))}</body></html>\n",
        encoding="utf-8",
    )


def _table(cells: Sequence[Sequence[str]]) -> str:
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in cells)
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>\n"
