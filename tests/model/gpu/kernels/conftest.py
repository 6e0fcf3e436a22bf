"""These tests run kernels: on a GPU, or in Triton's interpreter, which has to be chosen before a kernel is imported. So
where there is no GPU they are run by `tests/model/gpu/test_interpreted.py`, in a process of their own.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.model.gpu.kernels.device import CAN_RUN

collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance() -> Iterator[None]:
    """Fills with NaN what torch.empty makes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
