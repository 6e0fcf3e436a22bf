"""Draws a load: latencies, tokens a second and requests at a time. Needs matplotlib, the extra `plots`."""

import html
import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from rpc.loadgen.drive import LoadRun
from rpc.loadgen.observation import Observation, Targets
from rpc.loadgen.report import latency_rows, rows

BINS = 100  # bins of the time axis
SHOWN = 99.5  # percentile of latencies at which axes end: one stall would leave no room for the others
COLOURS = ("#1f5fa8", "#c8641e", "#3a8a4d")


def draw(run: LoadRun, targets: Targets, title: str) -> Figure:
    """Draws four panels, of requests that did not fail; interrupted ones count as far as they got."""
    timed = [one for one in run.seen if one.timed and one.times]
    done = [one for one in timed if one.complete]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, parse_math=False)  # the name of a model may have two dollar signs
    firsts, others, flow, busy = figure.subplots(2, 2).flat
    _shares(firsts, {"TTFT": [one.first for one in timed], "E2E": [one.whole for one in done]}, targets.first)
    _shares(others, {"TPOT": [one.other for one in done if one.other is not None], "ITL": _gaps(timed)}, targets.other)
    _flow(flow, run, timed)
    _live(busy, run)
    return figure


def _gaps(seen: list[Observation]) -> NDArray[np.float64]:
    return np.concatenate([one.gaps() for one in seen]) if seen else np.zeros(0)


def _shares(axes: Axes, latencies: dict[str, Any], target: float | None) -> None:
    """Draws empirical distributions of latencies."""
    for (name, values), colour in zip(latencies.items(), COLOURS, strict=False):
        if len(values):
            axes.ecdf(1000 * np.asarray(values), label=name, color=colour)
    if target is not None:
        axes.axvline(1000 * target, color="grey", linestyle="--", label="target")
    shown = [1000 * float(np.percentile(values, SHOWN)) for values in latencies.values() if len(values)]
    axes.set(xlabel="milliseconds", ylabel="share", xlim=(0, 1.1 * max(shown, default=1.0) or 1.0))
    axes.set_title(" and ".join(latencies))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def _flow(axes: Axes, run: LoadRun, seen: list[Observation]) -> None:
    """Draws tokens a second; a request's tokens are spread evenly over its messages."""
    edges = np.linspace(0, max(run.end - run.begin, 1e-9), BINS + 1)
    times = np.concatenate([np.array(one.times) - run.begin for one in seen]) if seen else np.zeros(0)
    weights = np.concatenate([np.full(len(one.times), one.tokens / len(one.times)) for one in seen]) if seen else times
    tokens, _ = np.histogram(times, edges, weights=weights)
    axes.stairs(tokens / np.diff(edges), edges, color=COLOURS[0])
    axes.set(title="Output tokens a second", xlabel="seconds", ylabel="tokens/s", ylim=(0, None))


def _live(axes: Axes, run: LoadRun) -> None:
    """Draws the numbers of requests that are running, due so far and ended so far."""
    starts = np.sort([one.due - run.begin for one in run.seen])
    ends = np.sort([one.ended - run.begin for one in run.seen if one.ended])
    times = np.linspace(0, max(run.end - run.begin, 1e-9), 500)
    due, ended = np.searchsorted(starts, times, "right"), np.searchsorted(ends, times, "right")
    axes.plot(times, due - ended, color=COLOURS[0], label="under way")
    axes.plot(times, due, color=COLOURS[1], label="due so far")
    axes.plot(times, ended, color=COLOURS[2], label="ended so far")
    axes.set(title="Requests", xlabel="seconds", ylabel="requests", ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def save(figure: Figure, result: dict[str, Any], title: str, path: Path) -> None:
    """Saves the figure as a picture, or as one HTML file with the tables below it.

    Raises:
        ValueError: The name ends in neither .png nor .html.
        OSError: The file cannot be written.
    """
    if path.suffix == ".png":
        figure.savefig(path, dpi=110)
    elif path.suffix == ".html":
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        path.write_text(_document(drawn.getvalue(), result, title), encoding="utf-8")
    else:
        raise ValueError(f"--plot {path} must end in .png or .html")


def _document(svg: str, result: dict[str, Any], title: str) -> str:
    picture = svg[svg.index("<svg") :]
    figures = _table(rows(result)) + _table(latency_rows(result))
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>'
        "body{font:15px sans-serif;max-width:75em;margin:2em auto}svg{width:100%;height:auto}"
        "td{padding:.15em 1em;text-align:right}td:first-child{text-align:left}table{margin:1em 0}"
        f"</style></head><body>\n{picture}\n{figures}</body></html>\n"
    )


def _table(cells: list[Any]) -> str:
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in cells)
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>\n"
