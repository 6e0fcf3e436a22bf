"""The machine that kernels run on in tests: compiled once for all."""

from functools import cache
from pathlib import Path

from model.kernels.machine import open_machine
from model.kernels.program import Machine
from model.settings import ModelSettings


@cache
def the_machine() -> Machine:
    return open_machine(Path(str(ModelSettings().kernel_cache)).expanduser())
