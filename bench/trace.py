"""Requests of a real service: when they came, how long they were."""

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

CONVERSATIONS = Path(__file__).parent / "traces" / "azure_llm_2023_conv_200.csv"


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds since the first request. prompt, output: tokens."""

    at: float
    prompt: int
    output: int


def read_trace(path: Path, count: int) -> list[Arrival]:
    """The first `count` requests of a trace in the Azure format, in order of arrival."""
    with path.open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Arrival((time - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]


def scaled(arrivals: list[Arrival], context: int, speed: float) -> list[Arrival]:
    """The same requests for a model of another context: lengths shrunk alike until the longest fits, arrivals `speed`
    times as dense.
    """
    longest = max(a.prompt + a.output for a in arrivals)
    shrink = min(1.0, (context - 1) / longest)  # rounding up may add a token
    return [Arrival(a.at / speed, max(1, int(a.prompt * shrink)), max(1, round(a.output * shrink))) for a in arrivals]
