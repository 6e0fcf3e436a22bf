"""Memory in pages of 2 MiB, where the system has them: fewer entries for the CPU to look up when much is read."""

import mmap

import torch
from torch import Tensor

PAGE = 2**21


def huge_zeros(size: int) -> Tensor:
    """uint8 [size], zeros, from an address that is a multiple of PAGE. Memory is taken when it is first written to."""
    room = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + size]
