import pytest

from model.cpu.kernels.program import Machine
from tests.support.kernels import the_machine


@pytest.fixture(scope="session")
def machine() -> Machine:
    return the_machine()
