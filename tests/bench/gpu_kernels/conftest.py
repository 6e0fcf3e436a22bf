"""These tests run kernels, see `tests/model/gpu/kernels`: without a GPU
`tests/bench/test_gpu_interpreted.py` runs them.
"""

import struct
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.model.gpu.kernels.device import CAN_RUN

collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU has them, not packed for a CPU."""
    monkeypatch.setattr("model.layers.onednn_multiplies", lambda _: False)


@pytest.fixture(autouse=True)
def constants_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.7's interpreter has none. Its results in bfloat16 are wrong anyhow: here kernels have to run."""

    def get_bf16(self: Any, value: float) -> TensorHandle:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return TensorHandle(np.array([bits >> 16], np.uint16), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "get_bf16", get_bf16, raising=False)
