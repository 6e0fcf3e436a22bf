"""Packs arrays of int32 into one, which goes to the device in one transfer."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 4
"""Numbers that each array is padded to: Triton compiles another kernel for arrays that do not begin at 16 bytes."""

Ints = NDArray[np.signedinteger[Any]]


class Packer:
    """Packs arrays of int32 into one."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, Ints]] = []
        self.size = 0

    def put(self, array: Ints, room: int = 0) -> int:
        """Reserves room for an array, at least `room` numbers, and returns its place.

        The array may be filled in later: `host` copies it.
        """
        at = self.size
        self._arrays.append((at, array))
        self.size += -(-max(array.size, room) // ALIGNED) * ALIGNED
        return at

    def host(self, device: torch.device) -> Tensor:
        """Returns the packed arrays, in pinned memory for a GPU, so that the host does not wait for their copy."""
        packed = torch.zeros(self.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        into = packed.numpy()
        for at, array in self._arrays:
            into[at : at + array.size] = array.reshape(-1)
        return packed
