"""`quire explain`: where the time of a recorded request went."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpc.cli.replay import AsJson, File, fail
from rpc.cli.tables import print_table

if TYPE_CHECKING:
    from scheduler.explaining import Explanation, RequestTimeline, TimelineInterval

NAMED = 8  # requests that a line names; of more it has the number


def explain(
    file: File,
    request: Annotated[
        int | None, typer.Argument(show_default=False, help="Number of a request. Unset: a table of all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a recorded request went: queued, prefill, decode, preempted.

    Replays the recording. A request's number is its `attempt` in the log of requests.
    """
    from rpc.engines.recordings import read_recording
    from scheduler.explaining import Explanation
    from scheduler.replaying import RecordingError

    try:
        recording = read_recording(file)
        numbers = _numbers(recording.attempts)
        if request is not None and request not in numbers.values():
            raise RecordingError(f"{file}: there is no request {request}; `quire explain {file}` lists all")
        asked = next((attempt for attempt, number in numbers.items() if number == request), None)
        found = Explanation(recording, asked)
    except (OSError, RecordingError) as error:
        fail(error)
    if found.replay.difference is not None:
        step = found.replay.difference.step
        typer.echo(f"quire: the replay differs at step {step}, where this ends: see `quire replay`", err=True)
    if asked is not None and asked not in found.timelines:
        raise typer.Exit(1)  # it came after the difference
    shown = found.timelines.values() if asked is None else [found.timelines[asked]]
    if as_json:
        print(json.dumps({"requests": [_as_json(found, numbers, one) for one in shown]}))
    elif asked is None:
        _print_all(found, numbers)
    else:
        _print_one(found, numbers, found.timelines[asked])


def _numbers(attempts: Sequence[int]) -> Mapping[int, int]:
    """Returns the number of each attempt for people: its frontend's own, where these are all different.

    An engine in a process of its own has the number of the frontend's connection in each attempt.
    """
    from rpc.link.coalesce import LOCAL

    own = {attempt: attempt & LOCAL for attempt in attempts}
    return own if len(set(own.values())) == len(own) else dict(zip(attempts, attempts, strict=True))


def _as_json(found: "Explanation", numbers: Mapping[int, int], one: "RequestTimeline") -> dict[str, Any]:
    """Returns a timeline with times in nanoseconds, those of moments from the first call on."""
    return {
        "request": numbers[one.attempt],
        "prompt_tokens": one.prompt,
        "cached_tokens": one.cached,
        "output_tokens": one.output,
        "ended": one.ended or None,
        "submitted_ns": one.intervals[0].start - found.began,
        "latency_ns": one.latency,
        "split_ns": {phase.value: spent for phase, spent in one.split().items()},
        "intervals": [
            {
                "phase": interval.phase.value,
                "start_ns": interval.start - found.began,
                "end_ns": interval.end - found.began,
                "steps": interval.steps,
                "tokens": interval.tokens,
                "lacks_ns": {lack.value: spent for lack, spent in interval.lacks.items()},
                "behind_ns": {str(numbers[attempt]): spent for attempt, spent in interval.behind.items()},
                "preempted_by": [numbers[attempt] for attempt in interval.by],
            }
            for interval in one.intervals
        ],
    }


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.3f}"


def _print_all(found: "Explanation", numbers: Mapping[int, int]) -> None:
    """Prints a table of all requests, with a column for each phase that some of them were in."""
    from scheduler.explaining import PHASES

    splits = {one.attempt: one.split() for one in found.timelines.values()}
    phases = [phase for phase in PHASES if any(split[phase] for split in splits.values())]
    rows = [
        [
            str(numbers[one.attempt]),
            _seconds(one.intervals[0].start - found.began),
            str(one.prompt),
            str(one.output),
            one.ended or "open",
            _seconds(one.latency),
            *(_seconds(spent) if (spent := splits[one.attempt][phase]) else "-" for phase in phases),
        ]
        for one in found.timelines.values()
    ]
    columns = ["request", "at", "prompt", "output", "end", "seconds", *(phase.value for phase in phases)]
    print_table(columns, rows, elastic=columns, right=[name for name in columns if name != "end"])


def _print_one(found: "Explanation", numbers: Mapping[int, int], one: "RequestTimeline") -> None:
    print(
        f"request {numbers[one.attempt]}: {one.prompt} prompt tokens ({one.cached} cached), {one.output} output "
        f"tokens, {one.ended or 'open at the end of the recording'}, {_seconds(one.latency)} s"
    )
    columns = ["from", "seconds", "phase", "steps", "tokens", ""]
    rows = [
        [
            _seconds(interval.start - found.began),
            _seconds(interval.end - interval.start),
            interval.phase.value,
            str(interval.steps or "-"),
            str(interval.tokens or "-"),
            _why(interval, numbers),
        ]
        for interval in one.intervals
    ]
    print_table(columns, rows, elastic=[""], right=["from", "seconds", "steps", "tokens"])


def _why(interval: "TimelineInterval", numbers: Mapping[int, int]) -> str:
    """Returns what a waiting request lacked, and which requests had rows meanwhile, the longest first."""
    parts = []
    if interval.by:
        parts.append(f"its pages went to {_named(interval.by, numbers)}")
    parts += [f"{lack.value} ({_seconds(spent)} s)" for lack, spent in interval.lacks.most_common()]
    if interval.behind:
        parts.append(f"behind {_named([attempt for attempt, _ in interval.behind.most_common()], numbers)}")
    return "; ".join(parts)


def _named(attempts: Sequence[int], numbers: Mapping[int, int]) -> str:
    names = [str(numbers[attempt]) for attempt in attempts[:NAMED]]
    more = len(attempts) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
