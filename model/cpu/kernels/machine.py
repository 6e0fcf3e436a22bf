"""The machine that this process runs on, as kernels see it."""

from pathlib import Path

from model.cpu.kernels.native import Compiler, why_not
from model.cpu.kernels.program import Machine
from model.cpu.kernels.team import Team


def open_machine(cache: Path | None) -> Machine:
    """cache: a directory for compiled kernels. Raises OSError, with the reason, where there can be none."""
    if reason := why_not():
        raise OSError(reason)
    return Machine(Compiler(cache), Team())
