"""Settings of `quire replay` with which a recorded time is simulated."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rpc.cli.tables import print_table

if TYPE_CHECKING:
    from scheduler.blueprint import Blueprint
    from scheduler.replaying import Recording

PARTS = re.compile(r"([+-])([0-9]+(?:\.[0-9]+)?)%")
RECORDED, MODELLED, CHANGED = "recorded", "simulated", "with changes"


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed settings; None leaves one as it was recorded.

    Attributes:
        policy: Scheduling policy.
        pages: Pages of the pool: a number, or a part more or less such as "+50%".
        eviction: Eviction policy.
        max_batched_tokens: Token budget of a step.
        max_sequences: Sequences that run at once.
        target_itl: Seconds that a step with decodes should take at most.
    """

    policy: str | None = None
    pages: str | None = None
    eviction: str | None = None
    max_batched_tokens: int | None = None
    max_sequences: int | None = None
    target_itl: float | None = None

    @property
    def any(self) -> bool:
        """Whether one is changed."""
        return self != Changes()

    def of(self, blueprint: "Blueprint") -> "Blueprint":
        """Returns a blueprint with the changes.

        Raises:
            ValueError: A setting is not valid.
        """
        from cache_manager.settings import CacheSettings

        names = ("policy", "max_batched_tokens", "max_sequences", "target_itl")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        eviction = blueprint.eviction if self.eviction is None else CacheSettings(eviction=self.eviction).eviction
        settings = replace(blueprint.settings, **given)
        return replace(blueprint, settings=settings, eviction=eviction, pages=self._pages(blueprint.pages))

    def _pages(self, recorded: int) -> int:
        if self.pages is None:
            return recorded
        if part := PARTS.fullmatch(self.pages):
            pages = round(recorded * (1 + float(part[1] + part[2]) / 100))
        elif self.pages.isdecimal():
            pages = int(self.pages)
        else:
            raise ValueError(f"--pages is {self.pages!r}, must be a number of pages, or a part such as +50% or -20%")
        if pages < 1:
            raise ValueError(f"--pages is {self.pages!r}, which leaves {pages} pages of {recorded}")
        return pages


def simulate(recording: "Recording", changes: Changes, as_json: bool) -> None:
    """Prints how a recorded time was served, how the model says that it was, and how it would have been.

    Raises:
        RecordingError: The recording cannot be simulated.
        ValueError: A setting is not valid.
    """
    from scheduler.simulating import Simulation, Trace

    changed = changes.of(recording.blueprint)
    trace = Trace.of(recording)
    figures = {
        RECORDED: trace.serving.figures(),
        MODELLED: Simulation(trace).run().figures(),
        CHANGED: Simulation(trace, changed).run().figures(),
    }
    if as_json:
        finite = {
            side: {name: None if math.isnan(value) else value for name, value in values.items()}
            for side, values in figures.items()
        }
        print(json.dumps(finite))
        return
    print_table(("", *figures), _rows(figures), (), tuple(figures))


def _rows(figures: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    return [[name, *(_written(values[name]) for values in figures.values())] for name in figures[RECORDED]]


def _written(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() and value >= 1 else f"{value:.4g}"
