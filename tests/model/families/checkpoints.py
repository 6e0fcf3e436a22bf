"""Writes a case's checkpoint with transformers, all parameters drawn so that leaving any one out shows."""

import re
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig, Mistral4Config, Mistral4ForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.model.families.cases import CONTEXT, Case
from tests.support.checkpoints import byte_tokenizer

BY_CLASS = {Mistral4Config.model_type: Mistral4ForCausalLM.__name__}
"""Models that transformers has, but not among those that it finds by their configuration."""
# It passes over a class of its own unless it may exist.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

VOCABULARY = 320
EPSILON = 0.02  # of norms: large enough that the key cannot be left unread
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPSILON,
    "layer_norm_eps": EPSILON,
    "layer_norm_epsilon": EPSILON,
    "norm_epsilon": EPSILON,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SPREAD = 1.6  # of what a linear makes of an input with variance 1
ADDS_ONE = ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm")
UNGATED = re.compile(r"(fc2|fc_out|mlp\.c_proj|dense_4h_to_h)\.weight$")
NUMBERED = re.compile(r"\.\d+\.")


def write(case: Case, directory: Path, shards: bool = False) -> Path:
    known = {field.name for field in fields(case.kind)} | set(case.kind.attribute_map)
    values = {key: value for key, value in SMALL.items() if key in known}
    config = case.kind(**(values | {"dtype": "float32"} | dict(case.changes)))
    torch.manual_seed(case.seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    drawn: set[int] = set()  # the output layer of a tied model is its embedding
    with torch.no_grad():
        for name, module in model.named_modules():
            for part, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in drawn:
                    _draw(case, module, f"{name}.{part}", parameter)
                drawn.add(id(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # about as far apart as scores
                buffer.normal_(0.0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size="60KB" if shards else "5GB")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _draw(case: Case, module: nn.Module, name: str, parameter: Tensor) -> None:
    """Norms, which transformers makes 1 (Gemma's 0, as it adds 1), and biases, which it makes 0, are random too."""
    last = NUMBERED.search(name) is None  # belongs to no layer
    first = "embeddings_layernorm" in name  # what it makes enters the first layer
    if name.endswith("e_score_correction_bias"):  # as far apart as scores
        parameter.normal_(0.0, 0.1)
    elif name.endswith(".bias"):
        parameter.normal_(0.0, 0.25 * (case.embedding if first else 1.0))
    elif name.endswith(".A_log"):  # a state that forgets slowly, else what it keeps would not show
        parameter.uniform_(-5.0, -1.0)
    elif parameter.ndim == 1:
        parameter.uniform_(0.5, 1.5).mul_(case.embedding if first else case.gain if last else 1.0)
        adds_one = case.kind.__name__.startswith("Gemma") and case.kind is not Gemma4TextConfig
        if adds_one or type(module).__name__ in ADDS_ONE:
            parameter.sub_(1.0)
    elif "per_layer" in name and isinstance(module, nn.Embedding):  # times 4, as large as the projection beside it
        parameter.normal_(0.0, 0.25)
    elif isinstance(module, nn.Embedding):
        scale = float(getattr(module, "scalar_embed_scale", 1.0))  # Gemma's, the root of the width
        words = module.num_embeddings == VOCABULARY
        parameter.normal_(0.0, case.embedding / (1.0 if scale == 1.0 else scale**0.5) if words else 0.5)
    else:
        width = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
        parameter.normal_(0.0, SPREAD * width**-0.5 * (case.gain if "project_out" in name else 1.0))
        if UNGATED.search(name):  # what all inputs make of an activation that is seldom negative would be all outputs
            parameter.sub_(parameter.mean(0 if isinstance(module, Conv1D) else 1, keepdim=True))
