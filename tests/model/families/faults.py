"""Mistakes that a reader of checkpoints could make, planted in the checkpoint: the right answer for the changed one is
what a faulty reader gives for the unchanged one.
"""

import re
from collections.abc import Callable, Sequence
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


def neighbours_as_halves(weight: torch.Tensor, dim: int = 16) -> torch.Tensor:
    """Rows of heads, or their norms, as if halves were rotated and not neighbours."""
    heads = weight if weight.shape[1] == dim else weight.unflatten(0, (-1, dim))
    return heads.unflatten(1, (dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def parts_of_mixer(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Gates, inputs, what writes, what reads and time steps of a state-space mixer in another order."""
    parts = rows.split((128, 128, 32, 32, 8))
    return torch.cat([parts[i] for i in order])


def by_mean_of_heads(rows: torch.Tensor) -> torch.Tensor:
    """Gives the 16 elements of a head the mean of their rows."""
    heads = rows.unflatten(0, (-1, 16))
    return heads.mean(1, keepdim=True).expand_as(heads).flatten(0, 1).contiguous()


SLIDING, FULL = "sliding_attention", "full_attention"

FAULTS = (
    spoiled("the decay's sign", "granite-hybrid", r"A_log", lambda rate: -rate),
    spoiled("the bias of time steps left out", "granite-hybrid", r"dt_bias", torch.zeros_like),
    spoiled("the convolution backwards", "granite-hybrid", r"conv1d\.weight", lambda taps: taps.flip(2)),
    spoiled("the convolution's bias left out", "granite-hybrid", r"conv1d\.bias", torch.zeros_like),
    spoiled("inputs for gates", "granite-hybrid", r"in_proj", lambda rows: parts_of_mixer(rows, (1, 0, 2, 3, 4))),
    spoiled("what writes reads", "granite-hybrid", r"in_proj", lambda rows: parts_of_mixer(rows, (0, 1, 3, 2, 4))),
    spoiled("what skips the state left out", "granite-hybrid", r"mamba\.D", torch.zeros_like),
    spoiled("the mixer's norm left out", "granite-hybrid", r"mamba\.norm", torch.ones_like),
    spoiled("the MLP beside experts left out", "granite-hybrid", r"shared_mlp\.output", torch.zeros_like),
    said("positions where there are none", "granite-hybrid", position_embedding_type="rope"),
    said("no positions", "granite-hybrid-dense", position_embedding_type=None),
    said("no positions", "granite-4-attention", position_embedding_type=None),
    said("residuals as they are", "granite-hybrid", residual_multiplier=1.0),
    spoiled("the convolution backwards", "lfm2", r"conv\.conv\.weight", lambda taps: taps.flip(2)),
    spoiled("the convolution one token late", "lfm2", r"conv\.conv\.weight", lambda taps: taps.roll(-1, 2)),
    spoiled(
        "gates of results for gates of inputs",
        "lfm2",
        r"conv\.in_proj",
        lambda w: torch.cat((w[64:128], w[:64], w[128:])),
    ),
    spoiled("inputs for gates of results", "lfm2", r"conv\.in_proj", lambda w: torch.cat((w[:64], w[128:], w[64:128]))),
    spoiled("norm of keys left out", "lfm2", r"k_layernorm", torch.ones_like),
    spoiled("the convolution's bias left out", "lfm2-biases", r"conv\.conv\.bias", torch.zeros_like),
    spoiled("gate for up", "lfm2", r"feed_forward\.w1", lambda w: w.roll(1, 0)),
    spoiled("the bias of the choice left out", "lfm2-moe", r"expert_bias", torch.zeros_like),
    said("weights as they are", "lfm2-moe", norm_topk_prob=False),
    said("the factor of weights left out", "lfm2-moe", routed_scaling_factor=1.0),
    said("what ReLU leaves not squared", "nemotron-h", mlp_hidden_act="relu"),
    spoiled("what skips the state left out", "nemotron-h", r"mixer\.D", torch.zeros_like),
    spoiled("what writes reads", "nemotron-h", r"in_proj", lambda rows: parts_of_mixer(rows, (0, 1, 3, 2, 4))),
    spoiled(
        "groups in each other's place",
        "nemotron-h",
        r"conv1d\.weight",
        lambda taps: torch.cat((taps[:128], taps[144:160], taps[128:144], taps[160:])),
    ),
    spoiled("the bias of the choice left out", "nemotron-h-moe", r"e_score_correction_bias", torch.zeros_like),
    said("all groups used", "nemotron-h-moe", topk_group=4),
    said("one expert fewer", "nemotron-h-moe", num_experts_per_tok=1),
    spoiled("the shared expert left out", "nemotron-h-moe", r"shared_experts\.down_proj", torch.zeros_like),
    spoiled("the mixer's bias left out", "nemotron-h-moe", r"in_proj\.bias", torch.zeros_like),
    spoiled("the decay's sign", "kimi-linear", r"A_log", lambda rate: -rate),
    spoiled("the decay's bias left out", "kimi-linear", r"dt_bias", torch.zeros_like),
    spoiled("the decay the same for all elements of a key", "kimi-linear", r"f_b_proj", by_mean_of_heads),
    spoiled("gates of results left out", "kimi-linear", r"g_b_proj", torch.zeros_like),
    spoiled("write gates left out", "kimi-linear", r"b_proj\.weight$", torch.zeros_like),
    spoiled("the convolution backwards", "kimi-linear", r"k_conv1d", lambda taps: taps.flip(2)),
    swapped("queries for keys in the convolution", "kimi-linear", "q_conv1d", "k_conv1d"),
    spoiled("the norm of results left out", "kimi-linear", r"o_norm", torch.ones_like),
    spoiled("the norm of latents left out", "kimi-linear", r"kv_a_layernorm", torch.ones_like),
    said("experts of all groups", "kimi-linear", topk_group=4),
    said("weights as they are", "kimi-linear", moe_renormalize=False),
    said("weights that sum up to one", "kimi-linear-plain", moe_renormalize=True),
    spoiled("the decay's sign", "mamba2", r"A_log", lambda rate: -rate),
    spoiled("the bias of time steps left out", "mamba2", r"dt_bias", torch.zeros_like),
    spoiled("the convolution's bias left out", "mamba2", r"conv1d\.bias", torch.zeros_like),
    spoiled("what writes reads", "mamba2", r"in_proj", lambda rows: parts_of_mixer(rows, (0, 1, 3, 2, 4))),
    spoiled("what skips the state left out", "mamba2", r"mixer\.D", torch.zeros_like),
    spoiled("the mixer's norm left out", "mamba2", r"mixer\.norm", torch.ones_like),
    spoiled("the mixer's bias left out", "mamba2-biases", r"in_proj\.bias", torch.zeros_like),
    spoiled("the output's bias left out", "mamba2-biases", r"out_proj\.bias", torch.zeros_like),
    *(
        said(f"{key} ignored", "falcon-h1", **{key: 1.0})
        for key in (
            *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
            *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
        )
    ),
    said("factors of the mixer backwards", "falcon-h1", ssm_multipliers=[0.8, 1.5, 0.6, 1.4, 0.7]),
    said("factors of the MLP swapped", "falcon-h1", mlp_multipliers=[0.5859375, 0.8838834764831844]),
    said("gates before the norm", "falcon-h1-normed", mamba_norm_before_gate=False),
    said("gates after the norm", "falcon-h1-gated", mamba_norm_before_gate=True),
    spoiled("the mixer's bias left out", "falcon-h1-normed", r"in_proj\.bias", torch.zeros_like),
    spoiled("the output's bias left out", "falcon-h1-normed", r"out_proj\.bias", torch.zeros_like),
    spoiled("the decay's sign", "qwen3.5", r"A_log", lambda rate: -rate),
    spoiled("the decay's bias left out", "qwen3.5", r"dt_bias", torch.zeros_like),
    spoiled("the convolution backwards", "qwen3.5", r"conv1d\.weight", lambda taps: taps.flip(2)),
    spoiled("the convolution one token late", "qwen3.5", r"conv1d\.weight", lambda taps: taps.roll(-1, 2)),
    swapped("the write gate decays", "qwen3.5", "in_proj_b", "in_proj_a"),
    spoiled(
        "queries for keys",
        "qwen3.5",
        r"in_proj_qkv\.weight",
        lambda rows: torch.cat((rows[32:64], rows[:32], rows[64:])),
    ),
    spoiled(
        "heads share keys in turn",
        "qwen3.5",
        r"in_proj_qkv\.weight",
        lambda rows: torch.cat((rows[:64], rows[64:].unflatten(0, (2, 2, 16)).transpose(0, 1).flatten(0, 2))),
    ),
    spoiled("one added to the norm of a recurrence", "qwen3.5-wide", r"linear_attn\.norm\.weight", lambda w: w + 1),
    spoiled("no one added to norms", "qwen3.5-wide", r"layernorm\.weight", lambda w: w - 1),
    spoiled(
        "gates before queries",
        "qwen3.5",
        r"q_proj\.weight",
        lambda rows: rows.unflatten(0, (4, 2, 16)).flip(1).flatten(0, 2),
    ),
    spoiled(
        "gates after all queries",
        "qwen3.5",
        r"q_proj\.weight",
        lambda rows: rows.unflatten(0, (2, 4, 16)).transpose(0, 1).flatten(0, 2),
    ),
    roped("all of a head rotated", "qwen3.5", partial_rotary_factor=1.0),
    spoiled("the shared expert left out", "qwen3.5-moe", r"shared_expert\.down_proj", torch.zeros_like),
    spoiled("the shared expert's gate left out", "qwen3.5-moe", r"shared_expert_gate", lambda gate: gate * 0 + 9),
    spoiled(
        "projections by kind",
        "qwen3-next",
        r"in_proj_qkvz\.weight",
        lambda rows: torch.cat([part.flatten(0, 1) for part in rows.unflatten(0, (2, 96)).split((16, 16, 32, 32), 1)]),
    ),
    spoiled(
        "gates by kind",
        "qwen3-next",
        r"in_proj_ba\.weight",
        lambda rows: rows.unflatten(0, (2, 2, 2)).transpose(0, 1).flatten(0, 2),
    ),
    said("experts scaled to a sum of 1", "qwen3-next", norm_topk_prob=True),
    said("a window too wide by one", "mistral-window", sliding_window=18),
    said("a window too narrow by one", "mistral-window", sliding_window=16),
    said("a window too wide by one", "mixtral-window", sliding_window=21),
    said("a window too wide by one", "qwen2-window", sliding_window=16),
    said("a window too wide by one", "gemma2", sliding_window=12),
    said("a window too narrow by one", "gemma3", sliding_window=12),
    said("a window too wide by one", "phi3", sliding_window=22),
    said("a window too narrow by one", "starcoder2", sliding_window=15),
    spoiled("norm of latents left out", "deepseek-v3", r"kv_a_layernorm", torch.ones_like),
    spoiled("norm of queries left out", "deepseek-v2", r"q_a_layernorm", torch.ones_like),
    said("neighbours taken for halves", "deepseek-v3", rope_interleave=False),
    said("halves taken for neighbours", "deepseek-v3-halves", rope_interleave=True),
    roped("the factor of scores left out", "deepseek-v2-lite", "mscale_all_dim"),
    spoiled(
        "values before keys",
        "deepseek-v2",
        r"kv_b_proj",
        lambda rows: rows.unflatten(0, (4, 2, 32)).flip(1).flatten(0, 2),
    ),
    spoiled(
        "all keys before all values",
        "deepseek-v2",
        r"kv_b_proj",
        lambda rows: rows.unflatten(0, (2, 4, 32)).transpose(0, 1).flatten(0, 2),
    ),
    spoiled("the rotated part before the latent", "deepseek-v3", r"kv_a_proj", lambda rows: rows.roll(32, 0)),
    spoiled(
        "the rotated part before the rest",
        "deepseek-v3",
        r"q_b_proj",
        lambda rows: rows.unflatten(0, (4, 2, 32)).flip(1).flatten(0, 2),
    ),
    said("the best of all experts", "deepseek-v2", topk_method="greedy"),
    said("neighbours taken for halves", "glm4-moe-lite", rope_interleave=False),
    roped("the factor of queries left out", "mistral4", "llama_4_scaling_beta"),
    roped("the factor of queries by another length", "mistral4", original_max_position_embeddings=33),
    said("all groups used", "mistral4", topk_group=4),
    said("weights as they are", "mistral4", norm_topk_prob=False),
    spoiled("the bias of the choice left out", "glm4-moe", r"e_score_correction_bias", torch.zeros_like),
    said("all groups used", "glm4-moe", topk_group=4),
    said("other groups", "glm4-moe", n_group=2, topk_group=1),
    said("weights as they are", "glm4-moe", norm_topk_prob=False),
    said("weights scaled to a sum of 1", "glm4-moe-plain", norm_topk_prob=True),
    said("the factor of weights left out", "glm4-moe", routed_scaling_factor=1.0),
    spoiled("the shared experts left out", "glm4-moe", r"shared_experts\.down_proj", torch.zeros_like),
    roped("all of a head rotated", "glm4-moe", partial_rotary_factor=1.0),
    said("chunks one token longer", "llama4", attention_chunk_size=14),
    said("no chunks", "llama4", attention_chunk_size=None),
    said("queries do not grow", "llama4", attn_temperature_tuning=False),
    said("queries grow later", "llama4", floor_scale=40),
    said("queries that rotate grow too late by half", "llama4", attn_scale=0.25),
    said("no norms of queries and keys", "llama4", use_qk_norm=False),
    said("the norms' usual epsilon", "llama4", rms_norm_eps=1e-5),
    said("all layers rotated", "llama4", no_rope_layers=[1] * 4),
    spoiled("the shared expert left out", "llama4", r"shared_expert\.down_proj", torch.zeros_like),
    spoiled("inputs as they are", "llama4", r"router", torch.zeros_like),
    spoiled("gate for up", "llama4", r"experts\.gate_up_proj", lambda w: w.roll(96, -1)),
    spoiled("halves rotated", "llama4", r"layers\.[012].*[qk]_proj", neighbours_as_halves),
    said("one expert fewer", "llama4-dense", num_experts_per_tok=1),
    roped("rope scaling ignored", "llama4-dense", "factor low_freq_factor high_freq_factor", rope_type="default"),
    said("norms of queries and keys", "llama4-dense", use_qk_norm=True),
    spoiled("norm of queries left out", "minimax-m2", r"q_norm", torch.ones_like),
    spoiled("one norm for all heads", "minimax-m2-wide", r"k_norm", lambda w: w[:32].repeat(4)),
    spoiled("the bias of the choice left out", "minimax-m2", r"e_score_correction_bias", torch.zeros_like),
    roped("all of a head rotated", "minimax-m2", partial_rotary_factor=1.0),
    said("one expert fewer", "minimax-m2-wide", num_experts_per_tok=2),
    said("the usual epsilon", "minimax-m2", rms_norm_eps=1e-6),
    said("the best expert alone counts", "phimoe", router_jitter_noise=0.0),
    said("all experts count", "phimoe-window", router_jitter_noise=10.0),
    roped("the factor of angles by length", "phimoe", short_mscale=1.0),
    spoiled("bias of the logits left out", "phimoe", r"lm_head\.bias", torch.zeros_like),
    spoiled("bias of a norm left out", "phimoe-window", r"post_attention_layernorm\.bias", torch.zeros_like),
    said("a window too wide by one", "phimoe-window", sliding_window=20),
    said("the usual epsilon", "phimoe", rms_norm_eps=1e-5),
    swapped("gate for up", "phimoe", ".w1.", ".w3."),
    spoiled("the bias of the choice left out", "ernie4.5-moe", r"e_score_correction_bias", torch.zeros_like),
    said("weights scaled to a sum of 1", "ernie4.5-moe", moe_norm_min=1e-12),
    said("one expert more", "ernie4.5-moe", moe_k=3),
    spoiled("halves rotated", "ernie4.5-moe", r"[qk]_proj\.weight", neighbours_as_halves),
    spoiled("the shared experts left out", "ernie4.5-moe-biases", r"shared_experts\.down_proj", torch.zeros_like),
    spoiled("the shared expert's bias left out", "ernie4.5-moe-biases", r"shared_experts.*bias", torch.zeros_like),
    spoiled("bias of the logits left out", "ernie4.5-moe-biases", r"lm_head\.bias", torch.zeros_like),
    said("the usual epsilon", "ernie4.5-moe-unshared", rms_norm_eps=1e-5),
    roped("all of a head rotated", "glm4", partial_rotary_factor=1.0),
    spoiled("halves rotated", "glm4-whole", r"[qk]_proj\.weight", lambda w: neighbours_as_halves(w, 32)),
    spoiled("attention bias left out", "glm4", r"q_proj\.bias", torch.zeros_like),
    swapped("norms after swapped", "glm4", "post_self_attn_layernorm", "post_mlp_layernorm"),
    swapped("norm before for norm after", "glm4", "post_attention_layernorm", "post_self_attn_layernorm"),
    said("the usual epsilon", "glm4-whole", rms_norm_eps=1e-5),
    spoiled("gate for up", "glm4", r"gate_up_proj", lambda w: w.roll(w.shape[0] // 2, 0)),
    said("embeddings as they are", "granite-moe", embedding_multiplier=1.0),
    said("residuals as they are", "granite-moe", residual_multiplier=1.0),
    said("scores scaled by the width of heads", "granite-moe-biases", attention_multiplier=0.25),
    said("logits as they are", "granite-moe-biases", logits_scaling=1.0),
    said("one expert fewer", "granite-moe-biases", num_experts_per_tok=2),
    spoiled("experts swapped", "granite-moe", r"output_linear", lambda experts: experts.flip(0)),
    spoiled("gate for up", "granite-moe", r"input_linear", lambda w: w.roll(w.shape[1] // 2, 1)),
    spoiled("sinks left out", "gpt-oss", r"sinks", lambda sinks: sinks - 100),
    spoiled("sinks of a head's neighbours", "gpt-oss", r"sinks", lambda sinks: sinks.flip(0)),
    spoiled(
        "gates in halves",
        "gpt-oss",
        r"gate_up_proj",
        lambda rows: rows.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    ),
    spoiled(
        "gates after what they multiply",
        "gpt-oss",
        r"gate_up_proj",
        lambda r: r.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    ),
    spoiled("experts' biases left out", "gpt-oss", r"down_proj_bias", torch.zeros_like),
    spoiled("the router's bias left out", "gpt-oss", r"router\.bias", torch.zeros_like),
    said("a window too wide by one", "gpt-oss", sliding_window=15),
    said("gates without a limit", "gpt-oss-limit", swiglu_limit=50.0),
    said("the other layers slide", "gpt-oss-limit", layer_types=[SLIDING, FULL, SLIDING]),
    said("a window too wide by one", "olmo3", sliding_window=14),
    said("no window", "starcoder2", sliding_window=None),
    said("the other layers slide", "ministral", layer_types=[FULL, SLIDING] * 2),
    said("the other layers slide", "gemma2", layer_types=[FULL, SLIDING] * 2),
    said("one more layer slides", "qwen3-window", layer_types=[FULL, SLIDING, SLIDING]),
    said("the other layers slide", "olmo3-yarn", layer_types=[SLIDING, FULL] * 2),
    said("all layers slide", "gemma3", layer_types=[SLIDING] * 4),
    spoiled("the stream as it is after a layer", "gemma4", r"layer_scalar", torch.ones_like),
    spoiled("tokens' own inputs of layers left out", "gemma4", r"embed_tokens_per_layer", torch.zeros_like),
    spoiled(
        "inputs of the next layer",
        "gemma4",
        r"embed_tokens_per_layer|per_layer_model_projection",
        lambda weight: weight.roll(-16, int(weight.shape[1] == 96)),
    ),
    spoiled("projections into inputs left out", "gemma4", r"per_layer_projection_norm", torch.zeros_like),
    spoiled("norm of what inputs add left out", "gemma4", r"post_per_layer_input_norm", torch.ones_like),
    said("no soft cap of logits", "gemma4", final_logit_softcapping=None),
    said("a window too wide by one", "gemma4", sliding_window=14),
    roped("more of each head rotated", "gemma4", kind=FULL, partial_rotary_factor=0.5),
    roped("rotated pairs of a narrow head", "gemma4-moe", kind=FULL, rope_theta=1000.0),
    roped("one rope base for all layers", "gemma4-moe", kind=SLIDING, rope_theta=1000000.0),
    spoiled("scales of experts left out", "gemma4-moe", r"per_expert_scale", torch.ones_like),
    spoiled("scales of the router's input left out", "gemma4-moe", r"router\.scale", torch.ones_like),
    swapped("norms of MLP and experts", "gemma4-moe", "pre_feedforward_layernorm.", "pre_feedforward_layernorm_2."),
    swapped("norms of their results", "gemma4-moe", "post_feedforward_layernorm_1.", "post_feedforward_layernorm_2."),
    said("one expert fewer", "gemma4-moe", top_k_experts=1),
    roped("rope scaling ignored", "llama-llama3", "factor low_freq_factor high_freq_factor", rope_type="default"),
    roped("rope scaling ignored", "llama-linear", "factor", rope_type="default"),
    roped("rope scaling ignored", "llama-yarn", "factor original_max_position_embeddings", rope_type="default"),
    roped("rope scaling ignored", "qwen3-yarn", "factor original_max_position_embeddings", rope_type="default"),
    roped("scaling of all frequencies", "llama-llama3", rope_type="linear"),
    roped("scaling of all frequencies", "llama-dynamic", rope_type="linear"),
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
    roped(
        "rope scaling in the windowed layers too",
        "olmo3-yarn",
        kind=SLIDING,
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
    ),
    roped(
        "rope scaling ignored", "olmo3-yarn", "factor original_max_position_embeddings", kind=FULL, rope_type="default"
    ),
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
    spoiled("the norm of embeddings left out", "bloom", r"word_embeddings_layernorm\.weight", torch.ones_like),
    spoiled("heads taken by kind", "bloom", r"query_key_value\.weight", by_kind),
    said("another scale of scores", "mpt-3-heads", attn_config={"softmax_scale": 0.25}),
    said("slopes of another kind", "mpt", attn_config={"alibi_bias_max": 7}),
    said("the usual epsilon", "mpt", layer_norm_epsilon=1e-5),
    said("all layers rotated", "smollm3", no_rope_layers=[1] * 4),
    said("the other layers rotated", "smollm3-window", no_rope_layers=[0, 1, 0, 1]),
    said("a window too wide by one", "smollm3-window", sliding_window=16),
    said("windows in the rotated layers", "smollm3-window", layer_types=[SLIDING, FULL] * 2),
    said("embeddings as they are", "granite", embedding_multiplier=1.0),
    said("residuals as they are", "granite", residual_multiplier=1.0),
    said("scores scaled by the width of heads", "granite", attention_multiplier=0.25),
    said("scores scaled by the width of heads", "granite-biases", attention_multiplier=0.25),
    said("logits as they are", "granite-biases", logits_scaling=1.0),
    spoiled("attention bias left out", "seed-oss", r"q_proj\.bias", torch.zeros_like),
    spoiled("output bias left out", "seed-oss-biases", r"o_proj\.bias", torch.zeros_like),
    said("logits as they are", "cohere", logit_scale=1.0),
    said("logits as they are", "cohere2", logit_scale=1.0),
    said("a window too wide by one", "cohere2", sliding_window=15),
    said("the other layers slide", "cohere2-mixed", layer_types=[SLIDING, FULL] * 2),
    said("the usual epsilon", "cohere", layer_norm_eps=1e-5),
    spoiled("halves rotated", "cohere", r"[qk]_proj\.weight", neighbours_as_halves),
    spoiled("halves rotated", "cohere2", r"[qk]_proj\.weight", neighbours_as_halves),
    spoiled(
        "norms of queries in the order of the checkpoint", "cohere-qk-norm", r"q_norm\.weight", neighbours_as_halves
    ),
    spoiled("one norm for all keys", "cohere-qk-norm", r"k_norm\.weight", lambda w: w[:1].expand_as(w)),
    roped("more of each head rotated", "stablelm", partial_rotary_factor=0.5),
    said("the usual epsilon", "stablelm-parallel", layer_norm_eps=1e-5),
    spoiled("attention bias left out", "stablelm", r"v_proj\.bias", torch.zeros_like),
    swapped("one query's norm for another's", "stablelm-parallel", "q_layernorm.norms.1.", "q_layernorm.norms.2."),
    said("more of each head rotated", "gptj", rotary_dim=16),
    said("the approximate gelu", "gptj-inner", activation_function="gelu_new"),
    said("the usual epsilon", "gptj", layer_norm_epsilon=1e-5),
    spoiled("halves rotated", "gptj-inner", r"[qk]_proj\.weight", neighbours_as_halves),
    spoiled("bias of the logits left out", "gptj", r"lm_head\.bias", torch.zeros_like),
    spoiled("halves rotated", "ernie4.5", r"[qk]_proj\.weight", neighbours_as_halves),
    said("the usual epsilon", "ernie4.5", rms_norm_eps=1e-5),
    spoiled("mlp bias left out", "ernie4.5-biases", r"down_proj\.bias", torch.zeros_like),
    spoiled("attention bias left out", "ernie4.5-biases", r"q_proj\.bias", torch.zeros_like),
    said("a window too narrow by one", "exaone4", sliding_window=15),
    said("layers rotated where they have windows alone", "exaone4-full", sliding_window=256),
    swapped("norms after swapped", "exaone4", "post_attention_layernorm", "post_feedforward_layernorm"),
    spoiled("norm of keys left out", "exaone4", r"k_norm\.weight", torch.ones_like),
    roped("the base as it is", "hunyuan-alpha", alpha=1.0),
    said("the usual epsilon", "hunyuan", rms_norm_eps=1e-5),
    spoiled("norm of keys left out", "hunyuan", r"key_layernorm\.weight", torch.ones_like),
    said("weights of experts not normalised", "qwen2-moe", norm_topk_prob=False),
    said("one expert fewer", "qwen2-moe", num_experts_per_tok=1),
    spoiled("the shared expert all open", "qwen2-moe", r"shared_expert_gate\.weight", torch.zeros_like),
    spoiled("no shared expert", "qwen2-moe-mixed", r"shared_expert\.down_proj\.weight", torch.zeros_like),
    said("the last layers slide", "qwen2-moe-mixed", layer_types=[FULL, FULL, SLIDING, SLIDING]),
    spoiled("norm of queries left out", "qwen3", r"q_norm\.weight", torch.ones_like),
    spoiled("norm of keys left out", "olmo2", r"k_norm\.weight", torch.ones_like),
    spoiled("norm of queries left out", "olmo3", r"q_norm\.weight", torch.ones_like),
    spoiled("norm of queries left out", "gemma3", r"q_norm\.weight", torch.zeros_like),
    spoiled("bias of a norm of queries left out", "phi-qk-norm", r"q_layernorm\.bias", torch.zeros_like),
    spoiled("norms without the 1", "gemma", r"norm\.weight", lambda w: w - 1),
    swapped("norms after swapped", "gemma2", "post_attention_layernorm", "post_feedforward_layernorm"),
    swapped("norms after swapped", "olmo2", "post_attention_layernorm", "post_feedforward_layernorm"),
    swapped("norms after swapped", "olmo3", "post_attention_layernorm", "post_feedforward_layernorm"),
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
