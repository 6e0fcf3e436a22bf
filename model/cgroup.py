"""Limits of a container: the memory and the processors of its cgroup, version 2."""

import math
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = "max"
RECLAIMABLE = ("inactive_file", "active_file")


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the bytes that the cgroup may take; None without a limit."""
    found = _read(root / "memory.max")
    return None if found is None or found == NO_LIMIT else int(found)


def memory_left(root: Path = ROOT) -> int | None:
    """Returns the bytes that the cgroup may still take; None without a limit.

    The kernel gives pages of files back before it refuses memory, so they count as free. A checkpoint that was read
    leaves many of them.
    """
    most, taken = memory_limit(root), _read(root / "memory.current")
    if most is None or taken is None:
        return None
    lines = (line.split() for line in (_read(root / "memory.stat") or "").splitlines())
    files = sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in RECLAIMABLE)
    return most - int(taken) + files


def processors(root: Path = ROOT) -> int | None:
    """Returns the count of processors that the cgroup's quota of time is worth, at least 1; None without a quota."""
    found = (_read(root / "cpu.max") or NO_LIMIT).split()
    if len(found) != 2 or found[0] == NO_LIMIT:
        return None
    return max(1, math.floor(int(found[0]) / int(found[1])))


def _read(path: Path) -> str | None:
    """Returns a file's text; None where there is none, as without cgroups of version 2."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
