"""Which GPUs of a machine each engine gets. Imports no torch: a server asks before any engine starts."""

import os
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class EngineGpus:
    """GPUs of the engines of a machine.

    Attributes:
        names: For each engine its GPUs, as CUDA_VISIBLE_DEVICES names them; None for all that there are.
        sharing: Most engines on one GPU.
    """

    names: tuple[str | None, ...]
    sharing: int


def visible_gpus() -> list[str]:
    """Names the NVIDIA GPUs that an engine's process sees, as CUDA_VISIBLE_DEVICES does."""
    nodes = len(list(DEVICES.glob("nvidia[0-9]*")))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(nodes)]
    # CUDA stops reading at the first entry that is no device.
    listed = takewhile(lambda one: one and not one.startswith("-"), (one.strip() for one in named.split(",")))
    return list(listed)[:nodes]


def gpus_of_engines(engines: int, flag: str, size: int, devices: str | None) -> EngineGpus:
    """Gives each engine GPUs of its own, in their order, or those that `devices` names.

    Args:
        engines: Engines of the machine.
        flag: Flag that says how many there are.
        size: GPUs of an engine.
        devices: GPUs of each engine, "0,1;2,3". None leaves it to this function.

    Raises:
        ValueError: There are too few GPUs, or `devices` names others.
    """
    visible = visible_gpus()
    if devices is not None:
        return _named(engines, flag, size, devices, visible)
    if len(visible) >= engines * size and engines > 1:
        return EngineGpus(tuple(",".join(visible[i * size : (i + 1) * size]) for i in range(engines)), 1)
    if engines > 1 and len(visible) > 1:
        raise ValueError(
            f"{flag} is {engines}, --tensor-parallel {size}: that takes {engines * size} GPUs, there are "
            f"{len(visible)}. Lower one of them, or name the GPUs of each engine, which may share some, in --devices"
        )
    return EngineGpus((None,) * engines, engines)


def _named(engines: int, flag: str, size: int, devices: str, visible: list[str]) -> EngineGpus:
    groups = [[name.strip() for name in group.split(",")] for group in devices.split(";")]
    if len(groups) != engines:
        raise ValueError(f"--devices is {devices!r}, which is for {len(groups)} engines: {flag} is {engines}")
    for group in groups:
        if len(group) != size or len(set(group)) != size:
            raise ValueError(f"--devices is {devices!r}: with --tensor-parallel {size} each engine takes {size} GPUs")
        if missing := [name for name in group if name.isdecimal() and name not in visible]:
            raise ValueError(f"--devices names GPU {missing[0]}, there are {', '.join(visible) or 'none'}")
    uses = Counter(name for group in groups for name in group)
    return EngineGpus(tuple(",".join(group) for group in groups), max(uses.values()))
