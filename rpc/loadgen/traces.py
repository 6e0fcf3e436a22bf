"""Traces of real services: arrival times, lengths and common text of their requests."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

OURS = Path(__file__).parent / "traces"
KNOWN = {"azure-conv": OURS / "azure_llm_2023_conv_200.csv", "mooncake": OURS / "mooncake_conversation_1000.jsonl"}
"""Traces that ship with Quire, by name; traces/README.md has their sources."""
BLOCK = 512  # tokens of each hash id in Mooncake's traces
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at: Seconds since the first request.
        prompt: Number of prompt tokens.
        output: Number of output tokens.
        blocks: Id of each block of the prompt. Equal ids mean equal text up to the end of that block.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read_trace(source: str | Path, count: int | None = None, kind: str | None = None) -> list[Arrival]:
    """Returns the first `count` requests of a trace, in order of arrival.

    Args:
        source: A name of `KNOWN`, or a file: .csv in the format of Azure's traces, .jsonl in that of Mooncake's.
        count: Number of requests; None reads all.
        kind: azure or mooncake; None goes by the name of the file.

    Raises:
        ValueError: The file is no such trace; the message names the line.
        OSError: The file cannot be read.
    """
    path = KNOWN.get(str(source), Path(source))
    known = KINDS.get(path.suffix, "") if kind is None else kind
    if known not in READERS:
        names = ", ".join(KNOWN)
        raise ValueError(f"--trace {source} must be one of {names}, or a file .csv (Azure's) or .jsonl (Mooncake's)")
    found = sorted(islice(READERS[known](path), count), key=lambda arrival: arrival.at)
    if not found:
        raise ValueError(f"{path} has no request")
    begin = found[0].at
    return [Arrival(a.at - begin, a.prompt, a.output, a.blocks) for a in found]


def scaled(arrivals: list[Arrival], context: int | None, speed: float) -> list[Arrival]:
    """Fits requests to another context and speed.

    Args:
        arrivals: Requests of a trace.
        context: Tokens that the longest request must fit; lengths shrink by one factor. None keeps the lengths, but
            for at least one token each.
        speed: Factor of the arrivals' rate.
    """
    shrink = shrink_of(arrivals, context)
    return [
        Arrival(a.at / speed, max(1, int(a.prompt * shrink)), max(1, round(a.output * shrink)), a.blocks)
        for a in arrivals
    ]


def shrink_of(arrivals: list[Arrival], context: int | None) -> float:
    """Returns the factor of the lengths; 1 if all fit."""
    if context is None:
        return 1.0
    longest = max(a.prompt + a.output for a in arrivals)
    return min(1.0, (context - 1) / max(1, longest))  # rounding up may add a token


def block_size(shrink: float) -> int:
    """Returns the tokens of a block of a trace whose lengths were multiplied by a factor."""
    return max(1, int(BLOCK * shrink))


def _azure(path: Path) -> Iterator[Arrival]:
    """Reads AzurePublicDataset's AzureLLMInferenceTrace files."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        if not set(columns) <= set(rows.fieldnames or ()):
            raise ValueError(f"{path}, line 1: must have the columns {', '.join(columns)}")
        for row in rows:
            time, prompt, output = (row[name] for name in columns)
            try:
                at = datetime.fromisoformat(time)
                at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)  # a local zone's clock jumps
                yield Arrival(at.timestamp(), _tokens(int(prompt)), _tokens(int(output)))
            except (ValueError, TypeError):
                raise ValueError(
                    f"{path}, line {rows.line_num}: must be a time and two numbers of tokens, "
                    f"not {time}, {prompt}, {output}"
                ) from None


def _mooncake(path: Path) -> Iterator[Arrival]:
    """Reads the traces of Mooncake (Qin et al., FAST 2025), whose timestamps are milliseconds."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _mooncake_row(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(
                    f'{path}, line {number}: must be an object with numbers "timestamp", "input_length", '
                    f'"output_length" and, if it has it, a list of whole numbers "hash_ids": {line.strip():.60}'
                ) from None


def _mooncake_row(row: dict[str, Any]) -> Arrival:
    at, prompt, output, blocks = row["timestamp"], row["input_length"], row["output_length"], row.get("hash_ids", [])
    if type(at) not in (int, float) or type(prompt) is not int or type(output) is not int:
        raise TypeError
    if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise TypeError
    if not 0 <= at < float("inf"):
        raise ValueError
    return Arrival(at / 1000, _tokens(prompt), _tokens(output), tuple(blocks))


def _tokens(count: int) -> int:
    if not 0 <= count <= MOST_TOKENS:
        raise ValueError
    return count


KINDS = {".csv": "azure", ".jsonl": "mooncake"}  # by suffix
READERS = {"azure": _azure, "mooncake": _mooncake}
