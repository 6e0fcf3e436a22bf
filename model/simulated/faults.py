"""Faults of simulated engines at given times: files of `quire serve --sim-faults` and of `quire simulate --faults`."""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

KILL, SLOW, STALL = "kill", "slow", "stall"
NEEDED = ("at", "kind", "engine")
OF_KIND = {KILL: (), SLOW: ("seconds", "factor"), STALL: ("seconds",)}
"""Fields that a fault of each kind has beside those that all have."""
SLOWEST = 1e9  # factor of several faults together


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one engine.

    It happens once, to the engine that serves in that place at that time, and not at all where none serves then. An
    engine that takes its place has no part of it.

    Attributes:
        at: Seconds since an engine first served in that place; in a simulation, since the first arrival.
        kind: `kill` ends the engine as SIGKILL does. `slow` makes its steps longer for a while. `stall` makes the first
            step that is launched from then on longer.
        engine: Number of its place, from 0.
        seconds: How long it is slow, or by how much the step is longer.
        factor: Of the time of steps that are launched while it is slow.
    """

    at: float
    kind: str
    engine: int
    seconds: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in tuple(OF_KIND):  # a tuple: a list in its place is not hashable
            raise ValueError(f"kind is {self.kind!r:.30}, must be one of {', '.join(OF_KIND)}")
        if type(self.engine) is not int or self.engine < 0:
            raise ValueError(f"engine is {self.engine!r:.30}, must be a number of an engine, from 0")
        for name, least, most in (("at", 0.0, 1e9), ("seconds", 0.0, 1e9), ("factor", 1e-3, 1e6)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r:.30}, must be a number in [{least:g}, {most:g}]")


class StepFaults:
    """Effect of one engine's faults on the time of its steps. Kills are not among them."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        """faults: Of this engine, at seconds since its start."""
        self._slow = [fault for fault in faults if fault.kind == SLOW]
        stalls = [fault for fault in faults if fault.kind == STALL]
        self._stalls = deque(sorted(stalls, key=lambda fault: fault.at))

    def lengthened(self, seconds: float, at: float) -> float:
        """Returns how long a step takes. A stall is over with it.

        Args:
            seconds: How long it takes without faults.
            at: When it is launched, in seconds since the engine's start. No earlier than in the call before.
        """
        factor = math.prod(fault.factor for fault in self._slow if fault.at <= at < fault.at + fault.seconds)
        stalled = 0.0
        while self._stalls and self._stalls[0].at <= at:
            stalled += self._stalls.popleft().seconds
        return seconds * min(factor, SLOWEST) + stalled


def read_faults(path: Path, engines: int, flag: str) -> tuple[Fault, ...]:
    """Reads faults: a JSON list of objects with the fields of `Fault`.

    Args:
        path: The file.
        engines: How many engines there can be.
        flag: The flag that this number comes from.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such list, or names an engine that there cannot be. The message names the file and the
            entry, and of a wrong field its name, its value and what it must be.
    """
    try:
        entries = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must be a list of faults")
    found = list[Fault]()
    for number, entry in enumerate(entries):
        try:
            found.append(_fault_of(entry))
            if (engine := found[-1].engine) >= engines:
                raise ValueError(f"engine is {engine}, must be in [0, {engines}), as {flag} is {engines}")
        except ValueError as error:
            raise ValueError(f"{path}: fault {number}: {error}") from None
    return tuple(found)


def _fault_of(entry: object) -> Fault:
    """Returns the fault of an entry. Raises ValueError."""
    if not isinstance(entry, dict):
        raise ValueError(f"is {entry!r:.30}, must be an object with {', '.join(NEEDED)}")
    known = [one.name for one in fields(Fault)]
    for name, value in entry.items():
        if name not in known:
            raise ValueError(f"{name!r:.30} is {value!r:.30}, but a fault has no such field: {', '.join(known)}")
    for name in NEEDED:
        if name not in entry:
            raise ValueError(f"{name} is missing")
    fault = Fault(**entry)
    own = OF_KIND[fault.kind]
    for name in own:
        if name not in entry:
            raise ValueError(f"{name} is missing: kind is {fault.kind!r}")
    for name, value in entry.items():
        if name not in (*NEEDED, *own):
            raise ValueError(f"{name} is {value!r:.30}, but a fault of kind {fault.kind!r} has none")
    return fault
