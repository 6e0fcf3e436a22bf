"""Faults of a simulated deployment, at given times."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

KINDS = ("kill", "slow")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one engine.

    Attributes:
        at: Seconds since the first arrival.
        kind: `kill` ends the engine: its requests go on elsewhere, and another one starts in its place. `slow` makes
            its steps longer for a while.
        engine: Its place, from 0. Nothing happens where none is there at that time.
        seconds: How long it is slow.
        factor: Of the time of its steps.
    """

    at: float
    kind: str
    engine: int
    seconds: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, must be one of {', '.join(KINDS)}")
        if type(self.engine) is not int or self.engine < 0:
            raise ValueError(f"engine is {self.engine!r}, must be a number of an engine, from 0")
        for name, least, most in (("at", 0.0, 1e9), ("seconds", 0.0, 1e9), ("factor", 1e-3, 1e6)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r:.30}, must be a number in [{least:g}, {most:g}]")


def read_faults(path: Path) -> list[Fault]:
    """Reads faults: a JSON list of objects with the fields of `Fault`.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such list. The message names the file and the entry.
    """
    try:
        entries = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must be a list of faults")
    names, found = [one.name for one in fields(Fault)], list[Fault]()
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {"at", "kind", "engine"} <= set(entry) <= set(names):
            raise ValueError(
                f"{path}: fault {number} must have at, kind and engine, and of {', '.join(names)} no other"
            )
        try:
            found.append(Fault(**entry))
        except ValueError as error:
            raise ValueError(f"{path}: fault {number}: {error}") from None
    return found
