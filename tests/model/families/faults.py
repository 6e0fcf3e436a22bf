"""Mistakes that a reader of checkpoints could make, planted in the checkpoint: the right answer for the changed one is
what a faulty reader gives for the unchanged one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.model.families.cases import BY_NAME, Case
from tests.model.families.classic import Values
from tests.model.families.styles import Tensors, edit_config, edit_tensors


@dataclass(frozen=True, eq=False)
class Fault:
    name: str
    case: Case
    plant: Callable[[Path], None]

    def __str__(self) -> str:
        return f"{self.case.name}: {self.name}"


def said(name: str, case: str, **values: Any) -> Fault:
    """config.json says something else."""
    return Fault(name, BY_NAME[case], lambda directory: edit_config(directory, lambda old: old | values))


def roped(name: str, case: str, drop: str = "", kind: str | None = None, **values: Any) -> Fault:
    """Its rope does. drop: keys to leave out. kind: of layers, where they have ropes of their own."""

    def change(old: Values) -> Values:
        rope = old["rope_parameters"] if kind is None else old["rope_parameters"][kind]
        for key in drop.split():
            del rope[key]
        rope |= values
        return old

    return Fault(name, BY_NAME[case], lambda directory: edit_config(directory, change))


def spoiled(name: str, case: str, pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """All tensors whose name has this pattern are others."""

    def plant(tensors: Tensors) -> Tensors:
        hit = [key for key in tensors if re.search(pattern, key)]
        assert hit
        return tensors | {key: change(tensors[key]) for key in hit}

    return Fault(name, BY_NAME[case], lambda directory: edit_tensors(directory, plant))


def swapped(name: str, case: str, one: str, other: str) -> Fault:
    """Two tensors stand in each other's place, in all layers or in the one that is named."""

    def plant(tensors: Tensors) -> Tensors:
        pairs = [(key, key.replace(one, other)) for key in tensors if one in key]
        assert pairs
        return tensors | {a: tensors[b] for a, b in pairs} | {b: tensors[a] for a, b in pairs}

    return Fault(name, BY_NAME[case], lambda directory: edit_tensors(directory, plant))


def by_kind(rows: torch.Tensor, heads: int = 4) -> torch.Tensor:
    """Fused queries, keys and values of each head, as all queries, all keys, all values."""
    return rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


SLIDING, FULL = "sliding_attention", "full_attention"

FAULTS = (
    said("a window too wide by one", "mistral-window", sliding_window=18),
    said("a window too narrow by one", "mistral-window", sliding_window=16),
    said("a window too wide by one", "mixtral-window", sliding_window=21),
    said("a window too wide by one", "qwen2-window", sliding_window=16),
    said("a window too wide by one", "gemma2", sliding_window=12),
    said("a window too narrow by one", "gemma3", sliding_window=12),
    said("a window too wide by one", "phi3", sliding_window=22),
    said("a window too narrow by one", "starcoder2", sliding_window=15),
    said("no window", "starcoder2", sliding_window=None),
    said("the other layers slide", "ministral", layer_types=[FULL, SLIDING] * 2),
    said("the other layers slide", "gemma2", layer_types=[FULL, SLIDING] * 2),
    said("one more layer slides", "qwen3-window", layer_types=[FULL, SLIDING, SLIDING]),
    said("all layers slide", "gemma3", layer_types=[SLIDING] * 4),
    roped("rope scaling ignored", "llama-llama3", "factor low_freq_factor high_freq_factor", rope_type="default"),
    roped("rope scaling ignored", "llama-linear", "factor", rope_type="default"),
    roped("rope scaling ignored", "llama-yarn", "factor original_max_position_embeddings", rope_type="default"),
    roped("rope scaling ignored", "qwen3-yarn", "factor original_max_position_embeddings", rope_type="default"),
    roped("scaling of all frequencies", "llama-llama3", rope_type="linear"),
    roped("the length of the training ignored", "llama-llama3", original_max_position_embeddings=256),
    roped("attention factor ignored", "llama-yarn-tuned", "attention_factor"),
    roped("betas ignored", "llama-yarn-tuned", "beta_fast beta_slow"),
    roped("truncated", "llama-yarn-tuned", truncate=True),
    roped("short factors ignored", "phi3-longrope", short_factor=[1.0] * 8),
    roped("rope base ignored", "gpt-neox-sequential", rope_theta=10000.0),
    roped("more of each head rotated", "gpt-neox", partial_rotary_factor=0.5),
    roped("all of each head rotated", "phi", partial_rotary_factor=1.0),
    roped("all of each head rotated", "phi3-partial", partial_rotary_factor=1.0),
    roped("one rope base for all layers", "gemma3", kind=SLIDING, rope_theta=1000000.0),
    roped("rope scaling in the windowed layers too", "gemma3-linear", kind=SLIDING, rope_type="linear", factor=4.0),
    roped("rope scaling ignored", "gemma3-linear", "factor", kind=FULL, rope_type="default"),
    said("no soft cap of scores", "gemma2", attn_logit_softcapping=None),
    said("no soft cap of logits", "gemma2", final_logit_softcapping=None),
    said("no soft cap of logits", "gemma3-linear", final_logit_softcapping=None),
    roped("rope scaling ignored", "gpt-neox-linear", "factor", rope_type="default"),
    said("a soft cap out of nowhere", "gemma2-uncapped", attn_logit_softcapping=50.0),
    said("scores scaled by the width of heads", "gemma2", query_pre_attn_scalar=16),
    said("scores scaled by the width of heads", "gemma3", query_pre_attn_scalar=16),
    said("weights of experts not normalised", "qwen3-moe", norm_topk_prob=False),
    said("weights of experts normalised", "qwen3-moe-mixed", norm_topk_prob=True),
    said("one expert fewer", "mixtral-window", num_experts_per_tok=2),
    said("sequential residual", "gpt-neox", use_parallel_residual=False),
    said("parallel residual", "gpt-neox-sequential", use_parallel_residual=True),
    said("the approximate gelu", "gpt2-inner", activation_function="gelu_new"),
    said("the exact gelu", "gpt2", activation_function="gelu"),
    said("the usual epsilon", "qwen3", rms_norm_eps=1e-6),
    said("the usual epsilon", "olmo2", rms_norm_eps=1e-6),
    said("the usual epsilon", "gemma", rms_norm_eps=1e-6),
    said("the usual epsilon", "mixtral", rms_norm_eps=1e-5),
    said("the usual epsilon", "phi3", rms_norm_eps=1e-5),
    said("the usual epsilon", "gpt2", layer_norm_epsilon=1e-5),
    said("the usual epsilon", "gpt-neox", layer_norm_eps=1e-5),
    said("the usual epsilon", "phi", layer_norm_eps=1e-5),
    said("the usual epsilon", "starcoder2", norm_epsilon=1e-5),
    said("the usual epsilon", "falcon", layer_norm_epsilon=1e-5),
    spoiled("norm of queries left out", "qwen3", r"q_norm\.weight", torch.ones_like),
    spoiled("norm of keys left out", "olmo2", r"k_norm\.weight", torch.ones_like),
    spoiled("norm of queries left out", "gemma3", r"q_norm\.weight", torch.zeros_like),
    spoiled("bias of a norm of queries left out", "phi-qk-norm", r"q_layernorm\.bias", torch.zeros_like),
    spoiled("norms without the 1", "gemma", r"norm\.weight", lambda w: w - 1),
    swapped("norms after swapped", "gemma2", "post_attention_layernorm", "post_feedforward_layernorm"),
    swapped("norms after swapped", "olmo2", "post_attention_layernorm", "post_feedforward_layernorm"),
    swapped("one norm for the other", "falcon-new", "ln_attn", "ln_mlp"),
    swapped(
        "experts swapped", "mixtral", "layers.1.block_sparse_moe.experts.0.", "layers.1.block_sparse_moe.experts.3."
    ),
    swapped("gate for up", "mixtral", ".w1.", ".w3."),
    swapped("experts swapped", "qwen3-moe", "layers.2.mlp.experts.1.", "layers.2.mlp.experts.4."),
    spoiled("attention bias left out", "llama-biases", r"q_proj\.bias", torch.zeros_like),
    spoiled("output bias left out", "llama-biases", r"o_proj\.bias", torch.zeros_like),
    spoiled("mlp bias left out", "llama-biases", r"0\.mlp\.gate_proj\.bias", torch.zeros_like),
    spoiled("attention bias left out", "qwen2", r"k_proj\.bias", torch.zeros_like),
    spoiled("attention bias left out", "starcoder2", r"v_proj\.bias", torch.zeros_like),
    spoiled("attention bias left out", "falcon-sequential", r"0\.self_attention\.dense\.bias", torch.zeros_like),
    spoiled("bias of the logits left out", "phi", r"lm_head\.bias", torch.zeros_like),
    spoiled("positions without the offset", "opt", r"embed_positions", lambda w: w.roll(2, 0)),
    spoiled("an offset of one", "opt-post-norm", r"embed_positions", lambda w: w.roll(1, 0)),
    spoiled("positions from one on", "gpt2", r"wpe", lambda w: w.roll(-1, 0)),
    spoiled("heads taken by kind", "gpt-neox", r"query_key_value", by_kind),
    spoiled("heads taken by kind", "falcon-sequential", r"query_key_value", by_kind),
    spoiled("gate for up", "phi3", r"gate_up_proj", lambda w: w.roll(w.shape[0] // 2, 0)),
)
