"""Where the tests of this folder run: on a CUDA device with Triton's back end.

QUIRE_DEVICE_TESTS=cpu runs them on a CPU with torch's back end instead: what they do with the engine is the same, and
what only a device has is left out (`needs_cuda`).
"""

import os

import pytest
import torch

REHEARSED = os.environ.get("QUIRE_DEVICE_TESTS") == "cpu"
CAN_RUN = REHEARSED or torch.cuda.is_available()
DEVICE = "cpu" if REHEARSED else "cuda"
BACKEND = "reference" if REHEARSED else "triton"
needs_cuda = pytest.mark.skipif(REHEARSED, reason="only a CUDA device has it")
