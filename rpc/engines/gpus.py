"""Which GPUs of a machine each engine gets. Imports no torch: a server asks before any engine starts."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

DEVICES = Path("/dev")
NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
"""A number, or the identifier of a GPU or of a part of one."""


@dataclass(frozen=True, slots=True)
class EngineGpus:
    """GPUs of the engines of a machine.

    Attributes:
        names: For each engine its GPUs, as CUDA_VISIBLE_DEVICES names them; None for all that there are.
        sharing: For each engine the engines on its GPU, itself included.
    """

    names: tuple[str | None, ...]
    sharing: tuple[int, ...]


def listed_gpus(named: str, count: int) -> list[str]:
    """Returns the GPUs that a CUDA_VISIBLE_DEVICES names, up to the first that is none, where CUDA stops reading.

    Args:
        named: Its value.
        count: GPUs of the machine; 0 where that is not known.
    """

    def is_one(name: str) -> bool:
        return bool(name) and not name.startswith("-") and not (count and name.isdecimal() and int(name) >= count)

    return list(takewhile(is_one, (name.strip() for name in named.split(","))))


def visible_gpus() -> list[str]:
    """Names the NVIDIA GPUs that an engine's process sees, as CUDA_VISIBLE_DEVICES does; [] where it is not known.

    Windows' subsystem for Linux has no file for each.
    """
    count = len(list(DEVICES.glob("nvidia[0-9]*")))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if named is None else listed_gpus(named, count)


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
        return EngineGpus(tuple(",".join(visible[i * size : (i + 1) * size]) for i in range(engines)), (1,) * engines)
    if engines > 1 and len(visible) > 1:
        raise ValueError(
            f"{flag} is {engines}, --tensor-parallel {size}: that takes {engines * size} GPUs, there are "
            f"{len(visible)}. Lower one of them, name the GPUs of each engine, which may share some, in --devices, or "
            "take --device cpu"
        )
    return EngineGpus((None,) * engines, (engines,) * engines)


def _named(engines: int, flag: str, size: int, devices: str, visible: list[str]) -> EngineGpus:
    groups = [[name.strip() for name in group.split(",")] for group in devices.split(";")]
    if len(groups) != engines:
        raise ValueError(f"--devices is {devices!r}, which is for {len(groups)} engines: {flag} is {engines}")
    for group in groups:
        if len(group) != size or len(set(group)) != size:
            raise ValueError(f"--devices is {devices!r}: with --tensor-parallel {size} each engine takes {size} GPUs")
        if wrong := [name for name in group if not NAME.fullmatch(name)]:
            raise ValueError(f"--devices is {devices!r}: {wrong[0]!r} names no GPU")
        if visible and (missing := [name for name in group if name.isdecimal() and name not in visible]):
            raise ValueError(f"--devices names GPU {missing[0]}, there are {', '.join(visible)}")
    uses = Counter(name for group in groups for name in group)
    sharing = tuple(max(uses[name] for name in group) for group in groups)
    return EngineGpus(tuple(",".join(group) for group in groups), sharing)
