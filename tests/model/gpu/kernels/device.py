"""The device that kernels run on."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAN_RUN = INTERPRETED or torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def compute_in(dtype: str) -> str:
    """The interpreter's products of bfloat16 are wrong (it multiplies their bits)."""
    return "float32" if INTERPRETED and dtype == "bfloat16" else dtype
