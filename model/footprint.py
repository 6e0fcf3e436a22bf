"""Bytes that the weights of a model take, from its config.json alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.architectures.registry import build_model
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import CheckpointError
from model.parallel.collective import ONE_RANK, Ranks
from model.tensors import Held, ProductMaker, Tensors
from model.weight_formats.registry import open_weight_format
from model.weights import MOST_TENSORS


class Shapes:
    """A checkpoint whose tensors have the shapes that a model asks for, and no numbers.

    Tensors that may be of any floating point are of 16 bits, as the scales of most quantized checkpoints are:
    config.json does not say it.
    """

    def __init__(self) -> None:
        self._taken = 0

    def take(
        self, _: str, shape: tuple[int, ...], dtype: torch.dtype | None, /, stored: torch.dtype | None = None
    ) -> Tensor:
        """Raises CheckpointError once a model asks for more tensors than a checkpoint may hold."""
        self._taken += 1
        if self._taken > MOST_TENSORS:
            raise CheckpointError(f"config.json describes a model of more than {MOST_TENSORS} tensors")
        return torch.empty(shape, dtype=dtype or stored or torch.float16, device="meta")

    def __contains__(self, name: str) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def ignore(self, pattern: str) -> None:
        """Does nothing: no tensor can be left over."""


def shape_of(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str | None = None,
    maker: ProductMaker | None = None,
    ranks: Ranks = ONE_RANK,
) -> Decoder:
    """Builds a model without its numbers.

    Args:
        config: Configuration of the model.
        dtype: Dtype of weights that are not quantized.
        quantization: See `open_weight_format`.
        maker: See `Tensors`.
        ranks: See `Tensors`.

    Raises:
        CheckpointError: See `build_model`.
    """
    return shape_with_weights(config, dtype, quantization, maker, ranks)[0]


def shape_with_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str | None = None,
    maker: ProductMaker | None = None,
    ranks: Ranks = ONE_RANK,
    packs: bool | None = None,
) -> tuple[Decoder, Held]:
    """Builds a model as `shape_of`. packs: see `Tensors`. Returns it, and what its weights take."""
    weights = open_weight_format(config, quantization)
    tensors = Tensors(Shapes(), dtype, torch.device("meta"), weights, maker, ranks, packs)
    with torch.inference_mode():
        return build_model(config, tensors), tensors.held


def weight_bytes(config: ModelConfig, dtype: str, quantization: str | None = None, packs: bool | None = None) -> int:
    """Returns the bytes of a model's weights.

    Args:
        config: Configuration of the model.
        dtype: Dtype of weights that are not quantized.
        quantization: See `open_weight_format`.
        packs: See `Tensors`.

    Raises:
        CheckpointError: See `build_model`.
    """
    return shape_with_weights(config, getattr(torch, dtype), quantization, packs=packs)[1].bytes
