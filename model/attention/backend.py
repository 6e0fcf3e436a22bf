"""Contract of paged attention: the shape of a step, and the operations of every back end.

A back end owns the KV pool: it allocates, writes and reads the bytes, and alone knows their layout.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NONE = -1  # no page


@dataclass(frozen=True, slots=True, eq=False)
class StateSegments:
    """Runs of a step's tokens that the states of recurrent layers go through, cut where checkpoints are.

    Attributes:
        offsets: [n] int64. Packed offset of each segment's first token.
        counts: [n] int64. Tokens of each.
        sources: [pages of a state, n] int32. Pages with the state before the segment, NONE for the first tokens of a
            sequence.
        targets: [pages of a state, n] int32. Pages that get the state after it, NONE where none keeps it. They may be
            the sources: a state is written in place.
        follows: [n] bool. Whether the segment goes on from the one before it.
    """

    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    follows: NDArray[np.bool_]

    @staticmethod
    def of(
        tables: NDArray[np.int32],
        interval: int,
        row: NDArray[np.int64],
        start: NDArray[np.int64],
        count: NDArray[np.int64],
    ) -> "StateSegments":
        """Cuts the packed slices of a step where checkpoints are.

        Args:
            tables: [pages of a state, rows, entries] int32. Pages of the entries of each row.
            interval: Tokens of an entry.
            row: [n] int64. Row of each slice.
            start: [n] int64. First position of each slice.
            count: [n] int64. The number of tokens of each slice.
        """
        first, entry = np.cumsum(count) - count, start // interval
        parts = (start + count - 1) // interval - entry + 1
        owner = np.repeat(np.arange(len(row)), parts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
        entry = entry[owner] + number
        begin = np.maximum(start[owner], entry * interval)
        end = np.minimum((start + count)[owner], (entry + 1) * interval)
        rows = row[owner]
        sources = np.where(begin > 0, tables[:, rows, np.maximum(begin - 1, 0) // interval], NONE)
        offsets = first[owner] + begin - start[owner]
        return StateSegments(offsets, end - begin, sources, tables[:, rows, entry], number > 0)


@dataclass(frozen=True, slots=True, eq=False)
class StepShape:
    """Places of a step's packed tokens, on the host.

    Attributes:
        slices: [n, 3] int32. Row, start, count.
        positions: [tokens] int64. Position of each token in its sequence.
        slots: [groups, tokens] int64. Slot of each token's KV: page x page_size + offset.
        tables: [groups, rows, width] int32. Page ids by batch row; entries past a row's tokens are meaningless.
        bidirectional: [n] int64. Length of the bidirectional prefix of each slice's sequence. Its tokens see each other
            in both directions, whatever the window. A slice that begins in the prefix reaches to its end.
        segments: What recurrent layers go through; None for a model without some.
    """

    slices: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    tables: NDArray[np.int32]
    bidirectional: NDArray[np.int64]
    segments: StateSegments | None = None


class AttentionBackend(Protocol):
    """Paged attention over one KV pool. A plan is made once a step and used by every layer.

    Attributes:
        name: Name of the back end, for messages.
    """

    name: str

    def plan(self, shape: StepShape) -> Any:
        """Makes the plan of a step, which `write` and `attend` take. Its type is the back end's own."""

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: Any) -> None:
        """Writes a layer's KV in place.

        Args:
            layer: Index of the layer in the model.
            keys: [tokens, kv_heads, head_dim].
            values: Likewise.
            plan: The plan of the step.
        """

    def attend(self, layer: int, queries: Tensor, plan: Any, sinks: Tensor | None = None) -> Tensor:
        """Computes a layer's attention over the sequences' pages.

        All KV of the step must have been written. Attention is causal but for bidirectional prefixes. Sums run in
        float32.

        Args:
            layer: Index of the layer in the model.
            queries: [tokens, heads, head_dim].
            plan: The plan of the step.
            sinks: [heads] float32. Score of a further key of each head, whose value is 0 (gpt-oss, 2025). None: none.

        Returns:
            [tokens, heads, head_dim] in the dtype of the queries.
        """

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copies pages in all layers.

        Args:
            pages: [n, 2] int32. Source page, target page; no page is both.
        """

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        """Returns pages in canonical form.

        A page of a state is as it is: float32 numbers, in the units of `cache_manager.states`.

        The form of others holds for each layer of the page's group K as [tokens, kv_heads, key_dim] and V as [tokens,
        kv_heads, value_dim], then the scales of all layers if they have some, then zeros. Every back end reads and
        writes it.

        Args:
            pages: [n] int32.
            groups: [n] int32. Page table that each page is in, as `KVLayout.tables` counts them: its layer group, or
                behind these a page of a state.

        Returns:
            [n, page_bytes] uint8.
        """

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        """Fills pages with content in canonical form, as `export` returns it.

        Args:
            pages: [n] int32.
            groups: [n] int32. Layer group of each page.
            content: [n, page_bytes] uint8.
        """

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fills pages with NaN, so that a read of freed memory shows."""
