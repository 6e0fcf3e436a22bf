"""The machine that kernels run on in tests: compiled once for all."""

from functools import cache

from model.cpu.kernels.machine import open_machine
from model.cpu.kernels.program import Machine
from model.settings import ModelSettings


@cache
def the_machine() -> Machine:
    return open_machine(ModelSettings().kernel_directory)
