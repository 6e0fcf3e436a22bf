"""Sums over ranks by exchanges of parts.

The law of `model.parallel.collective.Collective`: parts are added in the order of ranks, in float32. A ring reduction
of gloo or NCCL would add them in an order that depends on the place of a number in the buffer.
"""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

LEAST_SAVED = {"nccl": 2**23, "gloo": 2**16}
"""Bytes that a rank must be saved to receive before a second exchange pays, by the collective: at 400 GB/s and 20 us an
exchange between devices of one machine, at 1 GB/s and 60 us between machines."""

Adder = Callable[[Tensor], Tensor]
"""Adds parts [ranks, rows, width] by the law of sums. Returns [rows, width] in their dtype."""

ALIGNED = 128  # elements that a share is a multiple of, so that kernels read it by vectors


class Exchanges(Protocol):
    """Exchanges of a rank group."""

    def all_gather(self, x: Tensor) -> Tensor:
        """As `Collective.all_gather`."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """Returns row `rank` of all ranks' x [ranks, width], as [ranks, width] in the order of ranks."""


def add_in_order(parts: Tensor) -> Tensor:
    """`Adder` of torch's operations."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def sum_of_ranks(x: Tensor, ranks: int, exchanges: Exchanges, add: Adder, least_saved: int) -> Tensor:
    """Returns the sum of all ranks' x [rows, width].

    Small parts are all sent to all ranks, in one exchange. Large ones take two: each rank gets a share of the elements
    of all parts and adds them, then all ranks get all sums. Each of the two brings a rank 1 / ranks of the bytes. The
    bits are the same.

    Args:
        x: This rank's part. Its shape and dtype are those of all ranks' parts.
        ranks: The number of ranks.
        exchanges: Exchanges with the others.
        add: Adds parts.
        least_saved: Bytes that a second exchange must save.
    """
    whole = (ranks - 1) * x.nbytes
    if whole - 2 * whole // ranks < least_saved:
        return add(exchanges.all_gather(x))
    share = -(-x.numel() // (ranks * ALIGNED)) * ALIGNED
    flat = x.reshape(-1)
    padded = flat if ranks * share == len(flat) else F.pad(flat, (0, ranks * share - len(flat)))
    own = add(exchanges.all_to_all(padded.view(ranks, share))[:, None])
    return exchanges.all_gather(own).view(-1)[: x.numel()].view(x.shape)
