"""Law: what config.json leaves unsaid is what transformers takes it to be."""

import re
import shutil
from pathlib import Path

import pytest

from tests.model.families import reference
from tests.model.families.cases import CASES, Case
from tests.model.families.classic import Values
from tests.model.families.conftest import Shelf
from tests.model.families.parity import ask, compare
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.styles import Tensors, edit_config, edit_tensors

OPTIONAL = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    *("hidden_act", "hidden_activation", "activation_function", "activation"),
    *("rope_parameters", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("routed_scaling_factor", "rope_interleave", "num_experts_per_tok", "norm_topk_prob"),
    *("moe_norm_min", "router_jitter_noise"),
    *("use_parallel_residual", "parallel_attn"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "_sliding_window_pattern"),
    *("sliding_window_pattern", "logit_scale", "no_rope_layers"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("norm_eps", "position_embedding_type", "mlp_hidden_act", "time_step_limit", "mamba_norm_before_gate"),
    *("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "mlp_multipliers"),
    *("dtype", "bos_token_id", "eos_token_id", "use_cache", "initializer_range"),
)
MANY_EXPERTS = (
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "mistral4"),
)
PLACES = (FEW[1], FEW[5], FEW[-1])


def silent(values: Values) -> Values:
    """Without all that has a default and that the shapes of tensors do not depend on."""
    said = {key: value for key, value in values.items() if key not in OPTIONAL}
    if values["model_type"] == "falcon" and not values["parallel_attn"]:
        said["parallel_attn"] = False  # there are other norms then
    recurrent = {"linear_attention", "conv"} & set(values.get("layer_types", ()))
    if recurrent or values["model_type"] in ("gemma4_text", "granitemoehybrid"):
        said["layer_types"] = values["layer_types"]  # they have other tensors
    if values["model_type"] == "stablelm" and values["use_parallel_residual"]:
        said["use_parallel_residual"] = True  # there are other norms then
    if values["model_type"] in MANY_EXPERTS:
        said["num_experts_per_tok"] = values["num_experts_per_tok"]  # the default is more than there are
    return said


def faint(tensors: Tensors) -> Tensors:
    """With embeddings so small that the default epsilon of the norms after them shows."""
    embeddings = re.compile(r"(wte|wpe|embed_tokens|embed_positions|embed_in|word_embeddings|embeddings)\.weight$")
    return {name: tensor * 1e-3 if embeddings.search(name) else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow
def test_defaults_are_those_of_transformers(case: Case, shelf: Shelf, tmp_path: Path) -> None:
    shutil.copytree(shelf.checkpoint(case), tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, silent)
    edit_tensors(tmp_path, faint)
    compare(ask(tmp_path, PLACES), reference.read(tmp_path, PROMPTS, PLACES, case.padded))
