"""Results of a run: tables as Markdown and JSON, and goals."""

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.on_gpu.memory import free

WRONG = "WRONG"  # start of the verdict on a wrong result
CELL = 300  # characters of an error's message
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Prints progress on standard error."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Table:
    """A table of results.

    Attributes:
        title: Title.
        columns: Column to its format; the first one names the row.
        rows: Values by column. A row may lack columns; it has the key "failed" after an error, and "skipped" if time or
            memory was too short.
        notes: Lines below the table.
    """

    title: str
    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        """Adds a row. Raises KeyError for an unknown column."""
        if unknown := values.keys() - self.columns.keys() - {"failed", "skipped"}:
            raise KeyError(f"{self.title!r} has no columns {sorted(unknown)}")
        self.rows.append(values)
        say(f"{self.title}: {', '.join(f'{name} {self._cell(values, name)}' for name in self.columns)}")

    def skip(self, name: str, why: str) -> None:
        self._blank(name, "skipped", why)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Turns an exception inside into a failed row, and gives the device memory that it held back."""
        try:
            yield
        except Exception as error:  # other rows are still measured
            traceback.print_exc()
            self._blank(name, "failed", error_text(error))
        else:
            return
        free()

    def _blank(self, name: str, key: str, text: str) -> None:
        self.rows.append({next(iter(self.columns)): name, key: text})
        say(f"{self.title}: {name} {key}: {text}")

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        for row in self.rows:
            cells = [self._cell(row, name) for name in self.columns]
            why = [f"{key}: {_inline(row[key])}" for key in ("failed", "skipped") if key in row]
            lines.append(f"| {' | '.join([cells[0], *why, *cells[1 + len(why) :]])} |")
        if not self.rows:
            lines.append("| nothing was measured |")
        return "\n".join([*lines, *("" if i == 0 else note for i, note in enumerate(["", *self.notes])), ""])

    def _cell(self, row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        if value is None:
            return ""
        form = self.columns[name]
        return _inline(str(value)) if isinstance(value, str) else format(value, form)


GOALS = {
    "decode attention, 64 MiB of KV a layer and more, of the copy bandwidth": 0.75,
    "decode step of an 8B model at batch 1, of the floor of weights and KV": 0.80,
    "prefill of an 8B model, of the matrix rate": 0.60,
}
ATTENTION_GOAL, STEP_GOAL, PREFILL_GOAL = GOALS


@dataclass(frozen=True, slots=True)
class Goal:
    """One of `GOALS`, and its measurement.

    Attributes:
        name: Name of the goal.
        found: Measured share; None if it was not measured.
        about: Case of the measurement.
    """

    name: str
    found: float | None = None
    about: str = ""

    @staticmethod
    def least(name: str, parts: Mapping[str, float]) -> "Goal":
        """Returns the goal with the smallest share of all cases, which counts."""
        if not parts:
            return Goal(name)
        case = min(parts, key=lambda case: parts[case])
        met = sum(part >= GOALS[name] for part in parts.values())
        return Goal(name, parts[case], f"{case}; {met} of {len(parts)} reach it, the best {max(parts.values()):.0%}")

    @property
    def wanted(self) -> float:
        return GOALS[self.name]

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        return "met" if self.found >= self.wanted else "missed"  # NaN is missed

    def line(self) -> str:
        found = "" if self.found is None else f"{self.found:.0%}"
        return f"| {self.name} | {self.wanted:.0%} | {found} | {self.verdict} | {self.about} |"


@dataclass(slots=True)
class Report:
    """Report of a run. Tables are printed when they are complete.

    Attributes:
        facts: Facts about the device and the run.
        tables: Tables so far.
        goals: Goals by name.
        path: JSON file; None writes none.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    goals: dict[str, Goal] = field(default_factory=lambda: {name: Goal(name) for name in GOALS})
    path: Path | None = None

    def publish(self, *tables: Table) -> None:
        """Prints tables, and writes the JSON file, so that a run that is cut off leaves its results."""
        for table in tables:
            print(table.markdown(), flush=True)
        self.tables += tables
        self.write()

    def reached(self, goal: Goal) -> None:
        self.goals[goal.name] = goal

    def write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False))

    def goals_markdown(self) -> str:
        lines = ["### goals", "", "| goal | wanted | found | verdict | on |", "|---|---|---|---|---|"]
        return "\n".join([*lines, *(goal.line() for goal in self.goals.values()), ""])

    def as_dict(self) -> dict[str, Any]:
        goals = [
            {"name": g.name, "wanted": g.wanted, "found": g.found, "verdict": g.verdict, "on": g.about}
            for g in self.goals.values()
        ]
        tables = [{"title": t.title, "rows": t.rows, "notes": t.notes} for t in self.tables]
        return _finite({"facts": self.facts, "tables": tables, "goals": goals})

    @property
    def failures(self) -> list[str]:
        """Descriptions of failed measurements and wrong results."""
        return [
            f"{table.title}: {row[next(iter(table.columns))]}: {row.get('failed', row.get('verdict'))}"
            for table in self.tables
            for row in table.rows
            if "failed" in row or str(row.get("verdict", "")).startswith(WRONG)
        ]


def error_text(error: BaseException) -> str:
    """Returns type and message of an exception; of a long message about memory only the first sentence."""
    message = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        message = message.split(". ")[0]
    return f"{type(error).__name__}: {message}"[:CELL]


def _inline(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _finite(value: Any) -> Any:
    """Returns a value for JSON, which lacks infinite numbers and NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
