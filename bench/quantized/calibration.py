"""Finds the largest inputs of a model's linears, which static scales of activations are made of."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.architectures.registry import build_model
from model.config import read_config
from model.decoder import Decoder
from model.forward import ForwardBatch
from model.tensors import Tensors
from model.weight_formats.format import MadeProduct, WeightFormat
from model.weight_formats.stored import StoredWeight
from model.weights import Checkpoint

CPU = torch.device("cpu")


class _Watched:
    """A product that keeps the largest absolute value of its inputs."""

    def __init__(self, product: MadeProduct) -> None:
        self._product, self.largest = product, 0.0

    @property
    def nbytes(self) -> int:
        return self._product.nbytes

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        self.largest = max(self.largest, x.abs().max().item())
        return self._product(x, batch)


def largest_inputs(directory: Path, run: Callable[[Decoder], object]) -> dict[str, float]:
    """Returns the largest absolute value of each linear's inputs, by the linear's name.

    Args:
        directory: Directory of a plain checkpoint, which is loaded in float32.
        run: Runs a decoder over the tokens to look at, by the reference back end.
    """
    watched: list[tuple[Sequence[StoredWeight], _Watched]] = []

    def maker(
        form: WeightFormat, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, gated: bool
    ) -> _Watched:
        del gated
        made = _Watched(form.product(weights, bias, dtype, CPU))
        watched.append((weights, made))
        return made

    config = read_config(directory)
    run(build_model(config, Tensors(Checkpoint(directory), torch.float32, CPU, maker=maker)))
    return {weight.name: product.largest for weights, product in watched for weight in weights}
