"""A weight format whose products are stated: plain weights, and rows that numpy rounds to 8 bits and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.quantized.numbers import as_tensor
from model.fields import Fields
from model.forward import ForwardBatch
from model.layers import Linear
from model.weight_formats.format import WeightFormat
from model.weight_formats.plain import PLAIN, PlainWeights
from model.weight_formats.stored import StoredWeight
from tests.model.families.styles import edit_config
from tests.model.weight_formats.statements import round_rows


class StatedLinear:
    """Each part rounds its rows and multiplies as `Linear` does."""

    nbytes = 0

    def __init__(self, parts: Sequence[tuple[float | None, Linear]], kind: str, size: int | None) -> None:
        self._parts, self._kind, self._size = parts, kind, size

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        rounded = [as_tensor(round_rows(x.numpy(), self._kind, self._size, scale)) for scale, _ in self._parts]
        return torch.cat([linear(rows) for rows, (_, linear) in zip(rounded, self._parts, strict=True)], 1)


class Stated(PlainWeights):
    """`WeightFormat`. Options: kind of the rows' numbers, inputs that share a scale, and static scales by linear."""

    name = "stated"

    def __init__(self, options: Fields) -> None:
        self._kind, self._size = options.get("kind", str), options.get("size", int, 0) or None
        self._scales: dict[str, float] = options.get("scales", dict, {})

    def for_linear(self, name: str) -> WeightFormat:  # type: ignore[override]
        return PLAIN if name in ("lm_head", "embed_out") else self

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> StatedLinear:
        biases = [None] * len(weights) if bias is None else bias.split([weight.outputs for weight in weights])
        parts = [
            (self._scales.get(weight.name), Linear(weight["weight"].to(dtype).contiguous(), own))
            for weight, own in zip(weights, biases, strict=True)
        ]
        return StatedLinear(parts, self._kind, self._size)


def state(directory: Path, kind: str, size: int | None, scales: dict[str, float | None]) -> None:
    """Makes a checkpoint with plain weights one whose rows are rounded; scales: by name of a weight."""
    static = {name.removesuffix(".weight"): scale for name, scale in scales.items() if scale is not None}
    options: dict[str, Any] = {"quant_method": "stated", "kind": kind, "size": size, "scales": static}
    edit_config(directory, lambda values: values | {"quantization_config": options})
