"""Requests of real services: when they came, how long they were, and what text they had in common."""

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
"""Traces that come with Quire, by name; traces/README.md says whose they are."""
BLOCK = 512  # tokens for which Mooncake's traces have a hash id
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds since the first request. prompt, output: tokens. blocks: an id for each block of the prompt; equal
    ids are equal text, up to and with that block.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read_trace(source: str | Path, count: int | None = None) -> list[Arrival]:
    """The first `count` requests of a trace, in order of arrival.

    source: a name of `KNOWN`, or a file: .csv in the format of Azure's traces, .jsonl in that of Mooncake's. Raises
    ValueError, which names the line, for what is no such trace; OSError.
    """
    path = KNOWN.get(str(source), Path(source))
    kinds = {".csv": _azure, ".jsonl": _mooncake}
    if path.suffix not in kinds:
        names = ", ".join(KNOWN)
        raise ValueError(f"--trace {source} must be one of {names}, or a file .csv (Azure's) or .jsonl (Mooncake's)")
    found = sorted(islice(kinds[path.suffix](path), count), key=lambda arrival: arrival.at)
    if not found:
        raise ValueError(f"{path} has no request")
    begin = found[0].at
    return [Arrival(a.at - begin, a.prompt, a.output, a.blocks) for a in found]


def scaled(arrivals: list[Arrival], context: int | None, speed: float) -> list[Arrival]:
    """The same requests for a model of another context: lengths shrunk alike until the longest fits, arrivals `speed`
    times as dense. context: tokens; None: lengths stay, but that each has at least a token.
    """
    shrink = shrink_of(arrivals, context)
    return [
        Arrival(a.at / speed, max(1, int(a.prompt * shrink)), max(1, round(a.output * shrink)), a.blocks)
        for a in arrivals
    ]


def shrink_of(arrivals: list[Arrival], context: int | None) -> float:
    """What lengths are multiplied by; 1 where all fit."""
    if context is None:
        return 1.0
    longest = max(a.prompt + a.output for a in arrivals)
    return min(1.0, (context - 1) / max(1, longest))  # rounding up may add a token


def _azure(path: Path) -> Iterator[Arrival]:
    """Of AzurePublicDataset's AzureLLMInferenceTrace files."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        if not set(columns) <= set(rows.fieldnames or ()):
            raise ValueError(f"{path}, line 1: must have the columns {', '.join(columns)}")
        for row in rows:
            time, prompt, output = (row[name] for name in columns)
            try:
                at = datetime.fromisoformat(time)
                at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)  # a zone's clock jumps
                yield Arrival(at.timestamp(), _tokens(int(prompt)), _tokens(int(output)))
            except (ValueError, TypeError):
                raise ValueError(
                    f"{path}, line {rows.line_num}: must be a time and two numbers of tokens, "
                    f"not {time}, {prompt}, {output}"
                ) from None


def _mooncake(path: Path) -> Iterator[Arrival]:
    """Of the traces beside the paper of Qin et al., FAST 2025. timestamp: milliseconds."""
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
