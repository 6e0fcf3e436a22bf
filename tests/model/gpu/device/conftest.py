"""These tests run the engine on a CUDA device. Where there is none, they are skipped, each by its name.

`tests/model/gpu/test_device_tests.py` runs them on a CPU, so that they do not rot where no device is.
"""

from pathlib import Path

import pytest

from tests.model.gpu.device import engine
from tests.model.gpu.device.place import CAN_RUN


@pytest.fixture(scope="session", autouse=True)
def _on_a_device() -> None:
    if not CAN_RUN:
        pytest.skip("there is no CUDA device")


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped-query attention with heads of 64."""
    return engine.write_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, of which 4 compute a token."""
    return engine.write_mixture(tmp_path_factory.mktemp("mixture"))
