"""Timelines of recorded requests, as people and programs read them: numbers of requests, reasons of waits, JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rpc.link.coalesce import LOCAL
from scheduler.explaining import Explanation, RequestTimeline, TimelineInterval

NAMED = 8  # requests that a line names; of more it has the number


def request_numbers(attempts: Sequence[int]) -> Mapping[int, int]:
    """Returns the number of each attempt for people: its frontend's own, where these are all different.

    An engine in a process of its own has the number of the frontend's connection in each attempt.
    """
    own = {attempt: attempt & LOCAL for attempt in attempts}
    return own if len(set(own.values())) == len(own) else dict(zip(attempts, attempts, strict=True))


def timeline_json(found: Explanation, numbers: Mapping[int, int], one: RequestTimeline) -> dict[str, Any]:
    """Returns a timeline with times in nanoseconds, those of moments from the first call on.

    Args:
        found: The explanation that it is of.
        numbers: Number of each attempt, by which the timeline names it.
        one: The timeline.
    """
    return {
        "request": numbers[one.attempt],
        "prompt_tokens": one.prompt,
        "cached_tokens": one.cached,
        "output_tokens": one.output,
        "ended": one.ended or None,
        "came_before": one.came_before,
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
                "preempted_for": [cause.value for cause in interval.causes],
            }
            for interval in one.intervals
        ],
    }


def seconds_text(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.3f}"


def why(interval: TimelineInterval, numbers: Mapping[int, int]) -> str:
    """Returns why a waiting request was preempted, what it lacked, and which requests had rows, the longest first."""
    parts = []
    if interval.causes:
        parts.append(f"cause: {', '.join(cause.value for cause in interval.causes)}")
    if interval.by:
        parts.append(f"its pages went to {_named(interval.by, numbers)}")
    parts += [f"{lack.value} ({seconds_text(spent)} s)" for lack, spent in interval.lacks.most_common()]
    if interval.behind:
        parts.append(f"behind {_named([attempt for attempt, _ in interval.behind.most_common()], numbers)}")
    return "; ".join(parts)


def _named(attempts: Sequence[int], numbers: Mapping[int, int]) -> str:
    names = [str(numbers[attempt]) for attempt in attempts[:NAMED]]
    more = len(attempts) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
