"""Draws the chart of the README from bench/results/peers.csv.

python -m bench.charts

The figures are those of docs/benchmarks.md, which describes the measurement. New figures go into the CSV file and the
tables; then this program draws the chart again.
"""

import csv
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
DATA = ROOT / "bench" / "results" / "peers.csv"
CHART = ROOT / "docs" / "pictures" / "peers.svg"
MODEL = "llama-135m"
WORKLOADS = {
    "W2": "one request\n128 in, 128 out",
    "W4": "16 requests\n32 in, 256 out",
    "W3": "32 requests, 1,024 shared\n+ 32 in, 32 out",
    "W1": "64 requests, 32 at a time\n128-512 in, 32-128 out",
}
OURS, OTHERS = "#2f6f9f", "#b8b8b8"


def rates(path: Path = DATA) -> dict[str, dict[str, float]]:
    """Reads output tokens a second by workload and engine, in the order of the file.

    Raises:
        KeyError: The file lacks a column.
    """
    found: dict[str, dict[str, float]] = {workload: {} for workload in WORKLOADS}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["model"] == MODEL and row["measure"] in found:
                found[row["measure"]][row["engine"]] = float(row["value"])
    return found


def draw(path: Path = CHART) -> None:
    """Writes the chart as SVG whose text stays text, the same bytes for the same data and matplotlib."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quire", "font.size": 9}):
        figure = Figure(figsize=(9.6, 5.6), layout="constrained")
        for place, (workload, values) in zip(figure.subplots(2, 2).flat, rates().items(), strict=True):
            _draw_workload(place, workload, values)
        figure.suptitle(f"Output tokens a second: {MODEL}, bfloat16, greedy, 2 cores of a Zen 5")
        figure.savefig(path, metadata={"Date": None})


def _draw_workload(place: Axes, workload: str, values: dict[str, float]) -> None:
    engines = list(values)
    colours = [OURS if engine.startswith("Quire") else OTHERS for engine in engines]
    bars = place.barh(engines, list(values.values()), color=colours)
    place.bar_label(bars, [f"{value:,.1f}" for value in values.values()], padding=3)
    place.set_title(f"{workload}: {WORKLOADS[workload]}", fontsize=9)
    place.set_xlim(0, max(values.values()) * 1.2)
    place.invert_yaxis()  # the first engine of the file on top
    place.xaxis.set_visible(False)
    place.spines[["top", "right", "bottom"]].set_visible(False)


if __name__ == "__main__":
    draw()
