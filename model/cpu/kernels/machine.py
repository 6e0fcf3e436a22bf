"""Opens the machine that this process runs on, for kernels."""

from pathlib import Path

from model.cpu.kernels.native import Compiler, why_not
from model.cpu.kernels.program import Machine
from model.cpu.kernels.team import Team


def open_machine(cache: Path | None) -> Machine:
    """Opens the compiler and the threads.

    Args:
        cache: Directory for compiled kernels. None keeps none.

    Raises:
        OSError: Kernels cannot run here. Says why.
    """
    if reason := why_not():
        raise OSError(reason)
    return Machine(Compiler(cache), Team())
