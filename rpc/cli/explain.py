"""`quire explain`: where the time of a recorded request went."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpc.cli.charts import HtmlFile, check_charts
from rpc.cli.replay import AsJson, File, fail
from rpc.cli.tables import print_table

if TYPE_CHECKING:
    from scheduler.explaining import Explanation, RequestTimeline

    Numbers = Mapping[int, int]
    Table = list[list[str]]


def explain(
    file: File,
    request: Annotated[
        int | None, typer.Argument(show_default=False, help="Number of a request. Unset: all, the slowest first.")
    ] = None,
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a recorded request went: queued, prefill, decode, preempted.

    Replays the recording. A request's number is its `attempt` in the log of requests.
    """
    from rpc.engines.explained import request_numbers, timeline_json
    from rpc.engines.recordings import part_before, read_part, read_recording
    from scheduler.explaining import Explanation
    from scheduler.replaying import RecordingError

    try:
        check_charts(html)
        recording = read_recording(file)
        numbers = request_numbers(recording.attempts)
        if request is not None and request not in numbers.values():
            before = part_before(file)
            alone = read_part(file).replays  # else it was read behind the part before it
            hint = f"; older ones are in {before}" if alone and before.exists() else ""
            raise RecordingError(f"{file}: there is no request {request}; `quire explain {file}` lists all{hint}")
        asked = next((attempt for attempt, number in numbers.items() if number == request), None)
        found = Explanation(recording, asked)
    except (OSError, ValueError) as error:  # also a RecordingError
        fail(error)
    if found.replay.difference is not None:
        step = found.replay.difference.step
        typer.echo(f"quire: the replay differs at step {step}, where this ends: see `quire replay`", err=True)
    if asked is not None and asked not in found.timelines:
        raise typer.Exit(1)  # it came after the difference
    if html is not None:
        _write_page(found, numbers, asked, file, html)
    if as_json:
        shown = found.timelines.values() if asked is None else [found.timelines[asked]]
        print(json.dumps({"requests": [timeline_json(found, numbers, one) for one in shown]}))
    elif asked is None:
        columns, *rows = _all(found, numbers)
        print_table(columns, rows, elastic=columns, right=[name for name in columns if name != "end"])
    else:
        print(_about(found.timelines[asked], numbers))
        columns, *rows = _intervals(found, numbers, found.timelines[asked])
        print_table(columns, rows, elastic=[""], right=["from", "seconds", "steps", "tokens"])


def _write_page(found: "Explanation", numbers: "Numbers", asked: int | None, file: Path, html: Path) -> None:
    """Writes the timeline of the request that is asked for, or of the slowest, and the table that is printed."""
    from rpc.cli.explain_page import draw_request, draw_slowest
    from rpc.simulation.page import save

    if asked is None:
        title, table = f"Slowest requests of {file.name}", _all(found, numbers)
        figure = draw_slowest(found, numbers, title)
        tables = [table]
    else:
        one = found.timelines[asked]
        title = f"Request {numbers[asked]} of {file.name}"
        figure = draw_request(found, numbers, one, title)
        tables = [[[_about(one, numbers)]], _intervals(found, numbers, one)]
    try:
        save(figure, tables, title, html)
    except (OSError, ValueError) as error:  # ValueError: the name of the recording is no text
        fail(error)


def _all(found: "Explanation", numbers: "Numbers") -> "Table":
    """Returns a heading and a row for each request, slowest first, with a column for each phase that occurs."""
    from rpc.engines.explained import seconds_text
    from scheduler.explaining import PHASES

    splits = {one.attempt: one.split() for one in found.timelines.values()}
    phases = [phase for phase in PHASES if any(split[phase] for split in splits.values())]
    rows = [
        [
            str(numbers[one.attempt]),
            "before" if one.came_before else seconds_text(one.intervals[0].start - found.began),
            str(one.prompt),
            str(one.output),
            one.ended or "open",
            seconds_text(one.latency),
            *(seconds_text(spent) if (spent := splits[one.attempt][phase]) else "-" for phase in phases),
        ]
        for one in found.slowest()
    ]
    return [["request", "at", "prompt", "output", "end", "seconds", *(phase.value for phase in phases)], *rows]


def _about(one: "RequestTimeline", numbers: "Numbers") -> str:
    from rpc.engines.explained import seconds_text

    return (
        f"request {numbers[one.attempt]}: {one.prompt} prompt tokens ({one.cached} cached), {one.output} output "
        f"tokens, {one.ended or 'open at the end of the recording'}, {seconds_text(one.latency)} s"
        + (" from the beginning of the recording on: it came before" if one.came_before else "")
    )


def _intervals(found: "Explanation", numbers: "Numbers", one: "RequestTimeline") -> "Table":
    """Returns a heading and a row for each interval of a request."""
    from rpc.engines.explained import seconds_text, why

    rows = [
        [
            seconds_text(interval.start - found.began),
            seconds_text(interval.end - interval.start),
            interval.phase.value,
            str(interval.steps or "-"),
            str(interval.tokens or "-"),
            why(interval, numbers),
        ]
        for interval in one.intervals
    ]
    return [["from", "seconds", "phase", "steps", "tokens", ""], *rows]
