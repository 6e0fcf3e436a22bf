"""Pictures of recorded requests over time, by phase. Needs matplotlib, the extra `plots`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scheduler.explaining import PHASES, Explanation, RequestTimeline, TimelineInterval, TimelinePhase

COLOURS = {
    TimelinePhase.QUEUED: "#e0b050",
    TimelinePhase.HELD: "#9aa5b1",
    TimelinePhase.PREEMPTED: "#c8321e",
    TimelinePhase.SAT_OUT: "#5a6470",
    TimelinePhase.RECOMPUTE: "#8250df",
    TimelinePhase.PREFILL: "#1f5fa8",
    TimelinePhase.DECODE: "#3a8a4d",
}
SLOWEST = 40  # requests of a picture of all
OTHERS = 20  # requests that are shown beside the one that is asked for
POINTS = 4000  # bars that are closer than this part of the picture are one: there may be 100,000 intervals

Numbers = Mapping[int, int]


def draw_request(found: Explanation, numbers: Numbers, one: RequestTimeline, title: str) -> Figure:
    """Draws one request, a line for each phase, and below it the requests that it waited behind.

    Args:
        found: An explanation of the request.
        numbers: Number of each attempt.
        one: Its timeline.
        title: Title of the figure.
    """
    phases = [phase for phase in PHASES if any(interval.phase is phase for interval in one.intervals)]
    others = [found.timelines[attempt] for attempt in _others(one) if attempt in found.timelines]
    heights = [1 + len(phases), *([1 + len(others)] if others else [])]
    figure = Figure(figsize=(11, 1.2 + 0.32 * sum(heights)), layout="constrained")
    figure.suptitle(title, parse_math=False)  # the name of a file may have two dollar signs
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for line, phase in enumerate(phases):
        _bars(panels[0], line, [interval for interval in one.intervals if interval.phase is phase], found.began)
    _name_lines(panels[0], [phase.value for phase in phases])
    if others:
        for line, other in enumerate(others):
            _bars(panels[1], line, other.intervals, found.began)
        _name_lines(panels[1], [f"request {numbers[other.attempt]}" for other in others])
        panels[1].set_title("requests that it waited behind, the longest first")
        _explain_colours(panels[1], others)
    start, end = one.intervals[0].start - found.began, one.intervals[-1].end - found.began
    panels[-1].set(xlabel="seconds of the recording", xlim=(start / 1e9, max(end, start + 1) / 1e9))
    return figure


def draw_slowest(found: Explanation, numbers: Numbers, title: str) -> Figure:
    """Draws the slowest requests, a line each. Args are those of `draw_request`."""
    shown = found.slowest()[:SLOWEST]
    figure = Figure(figsize=(11, 1.6 + 0.24 * len(shown)), layout="constrained")
    figure.suptitle(title, parse_math=False)
    axes = figure.subplots()
    for line, one in enumerate(shown):
        _bars(axes, line, one.intervals, found.began)
    _name_lines(axes, [f"request {numbers[one.attempt]}" for one in shown])
    axes.set_xlabel("seconds of the recording")
    if shown:
        _explain_colours(axes, shown)
    return figure


def _others(one: RequestTimeline) -> list[int]:
    """Returns the attempts that had rows while a request waited, and that took its pages, the longest first."""
    behind = Counter[int]()
    for interval in one.intervals:
        behind.update(interval.behind)
        behind.update(dict.fromkeys(interval.by, 0))
    return [attempt for attempt, _ in behind.most_common(OTHERS)]


def _bars(axes: Axes, line: int, intervals: Sequence[TimelineInterval], began: int) -> None:
    """Draws intervals on one line. began: nanoseconds at which the recording begins."""
    for phase in PHASES:
        bars = _joined((one.start - began, one.end - began) for one in intervals if one.phase is phase)
        if bars:
            seconds = [(start / 1e9, (end - start) / 1e9) for start, end in bars]
            axes.broken_barh(seconds, (line - 0.4, 0.8), color=COLOURS[phase], linewidth=0.4)


def _joined(bars: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins bars with gaps too small to be seen."""
    found = list(bars)
    least = (found[-1][1] - found[0][0]) // POINTS if found else 0
    joined = list[tuple[int, int]]()
    for start, end in found:
        if joined and start - joined[-1][1] < least:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _name_lines(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _explain_colours(axes: Axes, shown: Sequence[RequestTimeline]) -> None:
    there = {interval.phase for one in shown for interval in one.intervals}
    patches = [Patch(color=COLOURS[phase], label=phase.value) for phase in PHASES if phase in there]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))
