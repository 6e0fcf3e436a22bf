"""Figures of structured output, and the tables of a comparison.

python -m bench.peers.structured_report FILE ...

prints the tables of all figures in the files that `python -m bench.peers.structured --json FILE` wrote.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.peers.workloads import FREE

NONE = "-"  # in place of a figure that an engine has not


class Figure(StrEnum):
    """A figure of an engine with a schema."""

    TOGETHER = "together"  # tokens a second of several requests at once
    ALONE = "alone"  # tokens a second of one request
    NEW = "new"  # milliseconds to a first token with a grammar that the engine has not seen
    KNOWN = "known"  # the same with one that it has
    VALID_LONG = "valid, long"  # share of valid outputs with room to end
    VALID_SHORT = "valid, short"  # the same where max_tokens is small


@dataclass(frozen=True, slots=True)
class StructuredRun:
    """One measured figure.

    Attributes:
        engine: Name of the engine.
        version: Its version.
        round: Number of the round.
        schema: Name of the schema, or FREE.
        figure: The figure.
        value: Its value.
        others: Share of the machine that other processes used in the turn.
    """

    engine: str
    version: str
    round: int
    schema: str
    figure: Figure
    value: float
    others: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return (
            f"round {self.round} {self.engine:16} {self.schema:8} {self.figure:12} {self.value:10.2f}; "
            f"others {self.others:.0%}"
        )


def report(runs: Sequence[StructuredRun]) -> str:
    """Returns the comparison as Markdown: rates, first tokens, valid outputs, and how busy the timed turns were."""
    engines = {run.engine: f"{run.engine} ({run.version})" for run in runs}
    schemas = [schema for schema in dict.fromkeys(run.schema for run in runs) if schema != FREE]
    of = _Figures(runs)

    def table(title: str, rows: Sequence[str], cell: Callable[[str, str], str]) -> list[str]:
        lines = [f"| {title} | {' | '.join(engines.values())} |", "|" + "---|" * (len(engines) + 1)]
        lines += [f"| {row} | {' | '.join(cell(name, row) for name in engines)} |" for row in rows]
        return [*lines, ""]

    timed = [run for run in runs if run.figure not in (Figure.VALID_LONG, Figure.VALID_SHORT)] or runs
    shares = sorted({(run.engine, run.round): run.others for run in timed}.values())
    lines = [
        *table("tokens a second, several at once", [FREE, *schemas], lambda e, s: of.rate(e, s, Figure.TOGETHER)),
        *table("tokens a second, one alone", [FREE, *schemas], lambda e, s: of.rate(e, s, Figure.ALONE)),
        *table("first token, ms: new grammar, known one", schemas,
               lambda e, s: of.pair(e, s, (Figure.NEW, Figure.KNOWN), "{:,.1f}".format)),
        *table("valid outputs: max_tokens 128, 48", schemas,
               lambda e, s: of.pair(e, s, (Figure.VALID_LONG, Figure.VALID_SHORT), "{:.0%}".format)),
        f"others' share of the machine: median {statistics.median(shares):.0%}, most {shares[-1]:.0%}",
    ]  # fmt: skip
    return "\n".join(lines)


class _Figures:
    """Medians of runs, as cells of a table."""

    def __init__(self, runs: Sequence[StructuredRun]) -> None:
        self._runs = runs

    def rate(self, engine: str, schema: str, figure: Figure) -> str:
        """Returns a rate and, beside a schema, the median of its ratios to the free rate of the same round."""
        own, free = self._by_round(engine, schema, figure), self._by_round(engine, FREE, figure)
        if not own:
            return NONE
        rate = f"{statistics.median(own.values()):,.1f}"
        ratios = [own[number] / free[number] for number in own.keys() & free.keys()]
        return rate if schema == FREE or not ratios else f"{rate} ({statistics.median(ratios):.0%})"

    def pair(self, engine: str, schema: str, figures: tuple[Figure, Figure], written: Callable[[float], str]) -> str:
        found = [list(self._values(engine, schema, figure)) for figure in figures]
        return ", ".join(written(statistics.median(values)) if values else NONE for values in found)

    def _by_round(self, engine: str, schema: str, figure: Figure) -> dict[int, float]:
        return {
            run.round: run.value
            for run in self._runs
            if (run.engine, run.schema, run.figure) == (engine, schema, figure)
        }

    def _values(self, engine: str, schema: str, figure: Figure) -> list[float]:
        return [run.value for run in self._runs if (run.engine, run.schema, run.figure) == (engine, schema, figure)]


def main() -> None:
    lines = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    print(report([StructuredRun(**line | {"figure": Figure(line["figure"])}) for line in lines]))


if __name__ == "__main__":
    main()
