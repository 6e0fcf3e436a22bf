"""Tables of token embeddings, whose rows are looked up: in the model's dtype, or integers of 8 bits with scales."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class EmbeddingTable(Protocol):
    """Embeddings of tokens, which an output layer may be tied to.

    Attributes:
        name: Full name in the checkpoint, without a suffix.
        vocabulary: Rows.
        width: Numbers of a row.
        dtype: The model's dtype.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def look_up(self, ids: Tensor) -> Tensor:
        """Returns the rows of these tokens, [n] int64, as [n, width] in the model's dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainTable:
    """`EmbeddingTable` of numbers.

    Attributes:
        weight: [vocabulary, width], in the model's dtype.
    """

    name: str
    weight: Tensor

    @property
    def vocabulary(self) -> int:
        return len(self.weight)

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


@dataclass(frozen=True, slots=True, eq=False)
class EightBitRows:
    """Rows of integers with a scale, and an offset, for each group of neighbours.

        number[row, i] = values[row, i] * scales[row, group of i] + offsets[row, group of i]

    Attributes:
        values: [rows, width] int8.
        scales: [rows, groups] float32. All groups have the same size.
        offsets: Likewise. None for zeros.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EightBitTable:
    """`EmbeddingTable` in 8 bits. A row is computed in float32, and rounded once where the model has another dtype."""

    name: str
    rows: EightBitRows
    dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        return len(self.rows.values)

    @property
    def width(self) -> int:
        return self.rows.values.shape[1]

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale."""
        return self.width // self.rows.scales.shape[1]

    @property
    def device(self) -> torch.device:
        return self.rows.values.device

    @property
    def nbytes(self) -> int:
        rows = self.rows
        return rows.values.nbytes + rows.scales.nbytes + (0 if rows.offsets is None else rows.offsets.nbytes)

    def look_up(self, ids: Tensor) -> Tensor:
        rows = self.rows
        numbers = rows.values.index_select(0, ids).float().unflatten(1, (-1, self.group_size))
        numbers = numbers * rows.scales.index_select(0, ids).unsqueeze(2)
        if rows.offsets is not None:
            numbers = numbers + rows.offsets.index_select(0, ids).unsqueeze(2)
        return numbers.flatten(1).to(self.dtype)
