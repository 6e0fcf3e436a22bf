"""Puts the tokens that a constraint forbids at -inf, from masks of bits."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.structured.grammar_mask import FINITE, GrammarMask

Forbid = Callable[[Tensor, NDArray[np.int64], NDArray[np.int32]], None]
"""Puts forbidden tokens at -inf, in place.

Args:
    logits: [n, vocabulary] float32.
    rows: [m] int64. Row of logits of each mask.
    bits: [m, words] int32. A bit a token, 1 for an allowed one.
"""


def forbid(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
    """`Forbid` on any device, by torch. A GPU gets bits, and makes a byte a token of them."""
    width = logits.shape[1]
    if logits.device.type == "cpu":
        forbidden = torch.from_numpy(np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :width] == 0)
    else:
        words = torch.from_numpy(bits).to(logits.device, non_blocking=True)
        shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
        forbidden = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :width] == 0
    for i, row in enumerate(rows.tolist()):
        logits[row].masked_fill_(forbidden[i], -torch.inf)


def apply_masks(logits: Tensor, rows: NDArray[np.int64], masks: Sequence[GrammarMask], forbid: Forbid = forbid) -> None:
    """Forbids tokens of a step's rows, in place.

    Args:
        logits: [m, vocabulary] float32.
        rows: [n] int64. Index in `logits` of each constraint's row, ascending.
        masks: [n] constraints.
        forbid: Applies their masks.

    Raises:
        RequestFault: A matcher has failed.
    """
    bits = np.stack([mask.mask() for mask in masks])
    over = [mask.can_only_end for mask in masks]
    for row in rows[over].tolist():
        logits[row].clamp_(min=FINITE)
    forbid(logits, rows, bits)
