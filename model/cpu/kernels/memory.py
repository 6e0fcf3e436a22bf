"""Allocates memory in pages of 2 MiB, where the system has them: large reads need fewer address look-ups of the CPU."""

import mmap

import torch
from torch import Tensor

PAGE = 2**21


def huge_zeros(size: int) -> Tensor:
    """Returns zeros, [size] uint8, at a multiple of PAGE. The system allocates on the first write."""
    room = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + size]
