"""These tests run kernels: on a GPU, or in Triton's interpreter, which has to be chosen before a kernel is imported. So
where there is no GPU they are run by `tests/model/gpu/test_interpreted.py`, in a process of their own.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.gpu.kernels.device import CAN_RUN

collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter compute each row of a product alone, as a GPU does.

    It multiplies by numpy's BLAS, which on some CPUs rounds the last rows of a matrix otherwise than the others.
    """

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        return (a[..., :, None, :].astype(dtype) * np.swapaxes(b, -1, -2)[..., None, :, :].astype(dtype)).sum(-1)

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance() -> Iterator[None]:
    """Fills with NaN what torch.empty makes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
