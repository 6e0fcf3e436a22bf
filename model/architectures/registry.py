"""Which class runs which architecture of a config.json."""

from typing import Protocol

import torch
from torch import Tensor

from model.architectures.llama import Llama
from model.attention.backend import AttentionBackend
from model.config import ModelConfig
from model.errors import CheckpointError
from model.weights import Checkpoint


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: AttentionBackend, plan: object
    ) -> Tensor:
        """Float32 logits [n, vocabulary] at the packed offsets `wanted` of tokens [tokens] at positions [tokens]."""


# Mistral (Jiang et al., 2023) and Ministral are Llama, with windows in all layers or in some.
ARCHITECTURES = {"LlamaForCausalLM": Llama, "MistralForCausalLM": Llama, "MinistralForCausalLM": Llama}


def load_model(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Model:
    """Raises CheckpointError for an architecture that is not there, or a checkpoint that does not fit."""
    kind = ARCHITECTURES.get(config.architecture)
    if kind is None:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"architecture {config.architecture!r} is not supported yet; supported: {known}")
    return kind(config, checkpoint, dtype, device)
