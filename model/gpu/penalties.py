"""Penalties on a GPU. The tokens of a sequence and their counts stay there; a step sends the latest token of each row.

A step takes one transfer of COLUMNS numbers a row and one launch for all rows, however many tokens have occurred.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from model.sampling.builtin_processors import Penalties
from model.sampling.sampler import Ints, on_device

BLOCK = 1024
"""Tokens that a program changes."""
ROOM = 512
"""Memory for the tokens of a sequence grows by this number of tokens, so that most steps allocate nothing."""
# Columns of controls, int64 each.
ROW = tl.constexpr(0)  # row of the logits
COUNTS = tl.constexpr(1)  # address of the sequence's counts
SIZE = tl.constexpr(2)  # tokens that have occurred
PLACE = tl.constexpr(3)  # place of the latest token among them
TOKEN = tl.constexpr(4)  # its id
TIMES = tl.constexpr(5)  # its occurrences in the output
COLUMNS = tl.constexpr(6)  # their number
# Counts of a sequence, int32: bits of the three penalties, one unused, then an id and occurrences of each token.
HEAD = tl.constexpr(4)


@dataclass(slots=True, eq=False)
class DeviceCounts:
    """Counts of a sequence on a device.

    Attributes:
        numbers: [HEAD + 2 * room] int32.
        room: The number of tokens that there is room for.
        changes: The number of output tokens that it has counted, see `Penalties.changes`.
    """

    numbers: Tensor
    room: int
    changes: int

    @classmethod
    def of(cls, penalties: Penalties, device: torch.device) -> "DeviceCounts":
        """Copies counts to a device, without waiting."""
        room = (penalties.size // ROOM + 1) * ROOM
        numbers = np.zeros(HEAD.value + 2 * room, np.int32)
        numbers[:3] = np.array(penalties.amounts, np.float32).view(np.int32)
        tokens = numbers[HEAD.value :].reshape(room, 2)[: penalties.size]
        tokens[:, 0], tokens[:, 1] = penalties.ids, penalties.counts
        return cls(torch.from_numpy(numbers).to(device, non_blocking=True), room, penalties.changes)


@triton.jit
def penalise_rows(logits, controls, stride, BLOCK: tl.constexpr):
    """Counts the latest token of rows and applies penalties. Grid: (rows, blocks of tokens).

    Launch it with `enable_fp_fusion=False`: each operation rounds, as it does in torch.

    Args:
        logits: [rows, vocabulary] float32, with this stride of rows. Changed in place.
        controls: [rows, COLUMNS] int64.
        stride: Elements between two rows of `logits`.
        BLOCK: Tokens of a block.
    """
    of = controls + tl.program_id(0) * COLUMNS
    counts = tl.load(of + COUNTS).to(tl.pointer_type(tl.int32))
    repetition = tl.load(counts).to(tl.float32, bitcast=True)
    frequency = tl.load(counts + 1).to(tl.float32, bitcast=True)
    presence = tl.load(counts + 2).to(tl.float32, bitcast=True)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < tl.load(of + SIZE)
    own = counts + HEAD + 2 * place
    # A step that is computed again counts a token once: its occurrences are sent, not that there is one more.
    latest = there & (place == tl.load(of + PLACE))
    token = tl.where(latest, tl.load(of + TOKEN).to(tl.int32), tl.load(own, mask=there, other=0))
    times = tl.where(latest, tl.load(of + TIMES).to(tl.int32), tl.load(own + 1, mask=there, other=0))
    tl.store(own, token, mask=latest)
    tl.store(own + 1, times, mask=latest)
    at = logits + tl.load(of + ROW) * stride + token
    x = tl.load(at, mask=there, other=0.0)
    scale = tl.zeros_like(x) + repetition
    x = tl.where(x > 0, tl.math.div_rn(x, scale), x * scale)
    x = x - frequency * times.to(tl.float32) - presence * (times > 0).to(tl.float32)
    tl.store(at, x, mask=there)


def penalise(logits: Tensor, rows: Ints, processors: Sequence[Penalties], positions: Ints) -> None:  # noqa: ARG001
    """Applies penalties in place. The logits are those of `Penalties.apply_rows`, to the bit.

    Args:
        logits: [rows, vocabulary] float32 on the device.
        rows: [n] int64. Rows of the logits, each once.
        processors: Penalties of each of these rows.
        positions: Not used: penalties depend on the tokens alone.
    """
    kept = [_counts(one, logits.device) for one in processors]
    controls = np.array(
        [
            (row, counts.numbers.data_ptr(), one.size, *one.latest)
            for row, one, counts in zip(rows.tolist(), processors, kept, strict=True)
        ],
        np.int64,
    )
    blocks = triton.cdiv(max(1, int(controls[:, SIZE.value].max())), BLOCK)
    penalise_rows[(len(kept), blocks)](
        logits, on_device(logits, controls), logits.stride(0), BLOCK=BLOCK, enable_fp_fusion=False
    )
    for one, counts in zip(processors, kept, strict=True):
        counts.changes = one.changes


def _counts(penalties: Penalties, device: torch.device) -> DeviceCounts:
    """Returns counts on a device that lack the latest token at most; they are copied where they lack more."""
    kept = penalties.on_device
    if isinstance(kept, DeviceCounts) and penalties.changes - kept.changes <= 1 and penalties.size <= kept.room:
        return kept
    made = penalties.on_device = DeviceCounts.of(penalties, device)
    return made
