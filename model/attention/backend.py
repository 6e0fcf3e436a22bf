"""What a step asks of attention, and what every back end offers.

A back end owns the KV pool: it allocates the bytes, writes them, reads them, and alone knows their layout.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepShape:
    """Where the packed tokens of a step stand, on the host.

    slices: [n, 3] of row, start, count. positions: [tokens]. slots: [groups, tokens], page x page_size + offset, where
    each token's KV goes. tables: [groups, rows, width] page ids by batch row; entries past a row's tokens are
    meaningless. whole: [n] for each slice, so many tokens at the front of its sequence see each other in both
    directions, whatever the window; a slice that begins among them reaches to their end.
    """

    slices: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    tables: NDArray[np.int32]
    whole: NDArray[np.int64]


class AttentionBackend(Protocol):
    """Paged attention over one pool. A plan is made once a step and used by every layer."""

    name: str

    def plan(self, shape: StepShape) -> Any:
        """Turns a step's shape into whatever `write` and `attend` need on the device."""

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: Any) -> None:
        """Writes KV in place. keys, values: [tokens, kv_heads, head_dim]."""

    def attend(self, layer: int, queries: Tensor, plan: Any) -> Tensor:
        """Attention of queries [tokens, heads, head_dim] over their sequences' pages, same shape and dtype back. It is
        causal, but for tokens that see each other in both directions.

        All KV of the step must have been written. Sums run in float32.
        """

    def copy(self, pages: NDArray[np.int32]) -> None:
        """pages: [n, 2] of page to copy from, page to copy to, in all layers; no page is both."""

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        """Pages in canonical form: uint8 [pages, page_bytes], for each layer of a group K and V as [tokens, kv_heads,
        head_dim], then their scales if there are some. Every back end reads and writes this form.
        """

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        """Fills pages with what `export` made of some."""

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fills pages with NaN, so that a read of freed memory shows."""
