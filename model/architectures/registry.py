"""Which function loads which architecture of a config.json."""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from model.architectures import falcon, gemma, gpt2, gpt_neox, llama, mixtral, olmo2, opt, phi, starcoder2
from model.attention.backend import AttentionBackend
from model.config import ModelConfig
from model.errors import CheckpointError
from model.tensors import Tensors
from model.weights import Checkpoint

log = logging.getLogger("quire.model")


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: AttentionBackend, plan: object
    ) -> Tensor:
        """Float32 logits [n, vocabulary] at the packed offsets `wanted` of tokens [tokens] at positions [tokens]."""


ARCHITECTURES: dict[str, Callable[[ModelConfig, Tensors], Model]] = {
    "FalconForCausalLM": falcon.load_falcon,
    "GPT2LMHeadModel": gpt2.load_gpt2,
    "GPTNeoXForCausalLM": gpt_neox.load_gpt_neox,
    "Gemma2ForCausalLM": gemma.load_gemma2,
    "Gemma3ForCausalLM": gemma.load_gemma3,
    "GemmaForCausalLM": gemma.load_gemma,
    "LlamaForCausalLM": llama.load_llama,
    "MinistralForCausalLM": llama.load_llama,
    "MistralForCausalLM": llama.load_llama,
    "MixtralForCausalLM": mixtral.load_mixtral,
    "OPTForCausalLM": opt.load_opt,
    "Olmo2ForCausalLM": olmo2.load_olmo2,
    "Phi3ForCausalLM": llama.load_phi3,
    "PhiForCausalLM": phi.load_phi,
    "Qwen2ForCausalLM": llama.load_qwen2,
    "Qwen3ForCausalLM": llama.load_qwen3,
    "Qwen3MoeForCausalLM": mixtral.load_qwen3_moe,
    "Starcoder2ForCausalLM": starcoder2.load_starcoder2,
}


def build_model(config: ModelConfig, tensors: Tensors) -> Model:
    """Raises CheckpointError for an architecture that is not there, or a checkpoint that does not fit."""
    load = ARCHITECTURES.get(config.architecture)
    if load is None:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"architecture {config.architecture!r} is not supported yet; supported: {known}")
    return load(config, tensors)


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
) -> Model:
    """quantization: None or int8. Raises CheckpointError as `build_model`, and for tensors that are left over."""
    tensors = Tensors(checkpoint, dtype, device, quantization == "int8")
    model = build_model(config, tensors)
    checkpoint.finish()
    log.info("Weights: %.1f MiB (%s)", tensors.held.bytes / 2**20, quantization or str(dtype).removeprefix("torch."))
    return model
