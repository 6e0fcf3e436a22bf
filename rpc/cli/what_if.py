"""Simulations of `quire replay`: a recorded time with other settings."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rpc.cli.tables import print_table, written

if TYPE_CHECKING:
    from rpc.simulation.changes import Changes
    from scheduler.replaying import Recording

RECORDED, MODELLED, CHANGED = "recorded", "simulated", "with changes"


def show_changes(recording: "Recording", changes: "Changes", replicas: int, as_json: bool) -> None:
    """Prints how a recorded time was served, how the model says that it was, and how it would have been.

    Raises:
        RecordingError: The recording cannot be simulated.
        ValueError: A setting is not valid.
    """
    from rpc.simulation.recorded import Trace, simulate
    from rpc.simulation.served import finite

    changed = changes.of(recording.blueprint)
    trace = Trace.of(recording)
    figures = {
        RECORDED: trace.serving.figures(),
        MODELLED: simulate(trace).figures(),
        CHANGED: simulate(trace, changed, replicas).figures(),
    }
    if as_json:
        print(json.dumps({side: finite(values) for side, values in figures.items()}))
        return
    print_table(("", *figures), _rows(figures), (), tuple(figures))


def _rows(figures: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    return [[name, *(written(values[name]) for values in figures.values())] for name in figures[RECORDED]]
