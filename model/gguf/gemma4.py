"""Reads the configuration of Gemma 4 from a GGUF file's metadata. Imports no torch."""

from model.errors import CheckpointError
from model.gguf.common import WINDOW, Values
from model.gguf.source import ConfigSource

KINDS = {True: "sliding_attention", False: "full_attention"}
LEFT_OUT = 1e29  # divisors of frequencies from here on stand for pairs that are not rotated


def read_gemma4(source: ConfigSource, common: Values) -> Values:
    """Gemma 4, whose layers differ by their window.

    Raises:
        CheckpointError: A key or a tensor that says how they differ is wrong.
    """
    layers, tensors = common["num_hidden_layers"], source.model.tensors
    sliding = source.flags("attention.sliding_window_pattern", layers)
    heads = source.by_layer("attention.head_count_kv", layers, common["num_attention_heads"])
    narrow = source.count("attention.key_length_swa", common["head_dim"])
    dims = [narrow if one else common["head_dim"] for one in sliding]
    full = [layer for layer, one in enumerate(sliding) if not one]
    shared = _read_shared(source, layers)
    values: Values = {
        "architectures": ["Gemma4ForCausalLM"],
        "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
        "layer_types": [KINDS[one] for one in sliding],
        "sliding_window": source.count(WINDOW),
        "num_kv_shared_layers": shared,
        "head_dim": narrow,
        "num_key_value_heads": heads[0],
        "per_layer_config": {
            str(layer): {"head_dim": dim, "num_key_value_heads": count}
            for layer, (dim, count) in enumerate(zip(dims, heads, strict=True))
        },
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in tensors,
        **_read_widths(source, layers, shared),
        **_read_ropes(source, common, narrow),
        **_read_inputs(source),
    }
    if source.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = source.number("final_logit_softcapping")
    if source.has("expert_count"):
        values |= {
            "enable_moe_block": True,
            "num_experts": source.count("expert_count"),
            "top_k_experts": source.count("expert_used_count"),
            "moe_intermediate_size": source.count("expert_feed_forward_length"),
            "experts_gate_up": "blk.0.ffn_gate_up_exps.weight" in tensors,
        }
    return values


def _read_shared(source: ConfigSource, layers: int) -> int:
    """Returns how many of the last layers read an earlier layer's KV."""
    fields, key = source.model.metadata.fields, f"{source.prefix}.attention.shared_kv_layers"
    shared = fields.get(key, int, 0)
    if not 0 <= shared < layers:
        raise fields.refuse(key, f"must be from 0 to {layers - 1}")
    return shared


def _read_widths(source: ConfigSource, layers: int, shared: int) -> Values:
    """Returns the width of MLPs. Layers without KV of their own may have it twice as wide."""
    widths = source.by_layer("feed_forward_length", layers)
    wide = widths[-1] != widths[0]
    last = 2 * widths[0] if wide else widths[0]
    if widths != [widths[0]] * (layers - shared) + [last] * shared:
        raise source.model.metadata.fields.refuse(
            f"{source.prefix}.feed_forward_length", f"must be twice as wide in the last {shared} layers, or alike"
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": wide}


def _read_ropes(source: ConfigSource, common: Values, narrow: int) -> Values:
    """Returns both rotary embeddings. Pairs of wide heads that are not rotated have a huge divisor."""
    fields = source.model.metadata.fields
    for key, dim in (("rope.dimension_count", common["head_dim"]), ("rope.dimension_count_swa", narrow)):
        if source.count(key, dim) != dim:
            raise fields.refuse(f"{source.prefix}.{key}", f"must be that of a head, {dim}")
    if source.has("rope.scaling.factor"):
        raise fields.refuse(f"{source.prefix}.rope.scaling.factor", "which is not supported for gemma4")
    divisors = source.factors("rope_freqs.weight") or [1.0]
    rotated = sum(one == 1.0 for one in divisors)
    if not rotated or any(one < LEFT_OUT for one in divisors[rotated:]):
        raise CheckpointError(
            f"{source.model.path}: tensor rope_freqs.weight must have 1 for pairs that are rotated, then {LEFT_OUT:g} "
            "or more for the others"
        )
    return {
        "rope_parameters": {
            KINDS[False]: {
                "rope_type": "proportional",
                "rope_theta": common["rope_theta"],
                "partial_rotary_factor": rotated / len(divisors),
            },
            KINDS[True]: {"rope_type": "default", "rope_theta": source.number("rope.freq_base_swa", 10000.0)},
        }
    }


def _read_inputs(source: ConfigSource) -> Values:
    """Returns the shape of inputs of layers, 0 wide where there are none."""
    width = source.model.metadata.fields.get(f"{source.prefix}.embedding_length_per_layer_input", int, 0)
    table = source.model.tensors.get("per_layer_token_embd.weight")
    if not width:
        return {"hidden_size_per_layer_input": 0}
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{source.model.path}: the tensor per_layer_token_embd.weight is missing or is no matrix")
    return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": table.shape[0]}
