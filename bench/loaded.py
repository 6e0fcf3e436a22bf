"""Loads a model's weights as an engine does, without an engine around them."""

from dataclasses import dataclass
from pathlib import Path

import torch

from model.architectures.registry import build_model
from model.backend import Backend
from model.backends import choose_backend
from model.config import ModelConfig, read_config
from model.decoder import Decoder
from model.gguf_weights import open_checkpoint
from model.memory import return_freed_memory
from model.settings import ModelSettings
from model.tensors import Tensors
from model.weight_formats.registry import open_weight_format

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model in memory.

    Attributes:
        config: Its configuration.
        dtype: Dtype of its activations, and of its KV.
        backend: Back end that its products are made for.
        decoder: Its layers.
        weight_bytes: Bytes that the layers keep.
    """

    config: ModelConfig
    dtype: str
    backend: Backend
    decoder: Decoder
    weight_bytes: int


def load(location: Path, dtype: str = "auto", quantization: str | None = None, backend: str = "auto") -> Loaded:
    """Loads a model.

    Args:
        location: Directory of the checkpoint, or its GGUF file.
        dtype: Value of --dtype.
        quantization: Value of --quantization.
        backend: Value of --backend.

    Raises:
        CheckpointError: The checkpoint cannot be served.
    """
    settings = ModelSettings(str(location), dtype=dtype, device="cpu", quantization=quantization, backend=backend)
    config = read_config(location)
    chosen = config.dtype if dtype == "auto" else dtype
    with torch.inference_mode():
        made_for = choose_backend(config, settings, chosen, chosen, "cpu")
        checkpoint, weights = open_checkpoint(location, config), open_weight_format(config, quantization)
        tensors = Tensors(checkpoint, getattr(torch, chosen), CPU, weights, made_for.maker)
        decoder = build_model(config, tensors)
    checkpoint.finish()
    return_freed_memory()
    return Loaded(config, chosen, made_for, decoder, tensors.held.bytes)
