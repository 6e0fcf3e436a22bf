"""Bytes that the weights of a model take, from its config.json alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.architectures.registry import build_model
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import CheckpointError
from model.parallel.collective import ALONE, Ranks
from model.tensors import ProductMaker, Tensors
from model.weights import MOST_TENSORS


class _Shapes:
    """A checkpoint that has the shapes of what is asked for, and no numbers."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, _: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """Raises CheckpointError once a model asks for more tensors than a checkpoint may hold."""
        self._taken += 1
        if self._taken > MOST_TENSORS:
            raise CheckpointError(f"config.json describes a model of more than {MOST_TENSORS} tensors")
        return torch.empty(shape, dtype=dtype, device="meta")

    def __contains__(self, name: str) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def ignore(self, pattern: str) -> None:
        """Nothing is left over."""


def shape_of(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str | None = None,
    maker: ProductMaker | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """The model without its numbers. maker, ranks: as in `Tensors`. Raises CheckpointError as `build_model`."""
    tensors = Tensors(_Shapes(), dtype, torch.device("meta"), quantization is not None, maker, ranks)
    with torch.inference_mode():
        return build_model(config, tensors)


def weight_bytes(config: ModelConfig, dtype: str, quantization: str | None = None) -> int:
    """dtype: of what is not quantized. As on a CPU, where an output layer that is tied is a copy of the embedding in
    float32 and bfloat16. Raises CheckpointError as `build_model`.
    """
    tensors = Tensors(_Shapes(), getattr(torch, dtype), torch.device("meta"), quantization is not None)
    with torch.inference_mode():
        build_model(config, tensors)
    return tensors.held.bytes
