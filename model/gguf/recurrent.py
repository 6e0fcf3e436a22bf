"""Reads the configuration of models with a gated delta rule from a GGUF file's metadata. Imports no torch."""

from model.errors import CheckpointError
from model.gguf.common import Values, like_llama, read_predictors
from model.gguf.source import Source

KINDS = {True: "linear_attention", False: "full_attention"}


def read_qwen3_next(source: Source, common: Values) -> Values:
    """Qwen 3 Next. Older files have its projections by key head, as the hub has them."""
    apart = not any(name.endswith(".ssm_in.weight") for name in source.model.tensors)
    return _read_layers(source, common, "Qwen3NextForCausalLM") | read_experts(source) | {"in_proj_apart": apart}


def read_qwen3_5(source: Source, common: Values) -> Values:
    return _read_layers(source, common, "Qwen3_5ForCausalLM") | _read_tiles(source)


def read_qwen3_5_moe(source: Source, common: Values) -> Values:
    return _read_layers(source, common, "Qwen3_5MoeForCausalLM") | read_experts(source) | _read_tiles(source)


def _read_tiles(source: Source) -> Values:
    """Returns the numbers of `model.weight_formats.tiles.HeadTiles`, where they change an order."""
    key_heads, heads = source.count("ssm.group_count"), source.count("ssm.time_step_rank")
    each = heads // key_heads
    return {"tiled_inputs": [key_heads, each, source.count("ssm.inner_size") // heads]} if each > 1 else {}


def read_experts(source: Source) -> Values:
    return {
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": source.count("expert_shared_feed_forward_length"),
        "num_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp has no other
    }


def _read_layers(source: Source, common: Values, architecture: str) -> Values:
    """Returns what all these models say."""
    metadata, heads = source.model.metadata, source.count("ssm.time_step_rank")
    counts = read_predictors(source, common)
    layers, every = counts["num_hidden_layers"], source.count("full_attention_interval", 4)
    recurrent = [(number + 1) % every != 0 for number in range(layers)]
    if source.has("attention.recurrent_layers"):
        key = f"{source.prefix}.attention.recurrent_layers"
        recurrent = metadata.flags(key)[:layers]
        if len(recurrent) < layers:
            raise CheckpointError(f"{metadata.path}: {key!r} has {len(recurrent)} values for {layers} layers")
    return like_llama(architecture, width=1)(source, common) | {
        **counts,
        "layer_types": [KINDS[one] for one in recurrent],
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
        "linear_num_key_heads": source.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": source.count("ssm.state_size"),
        "linear_value_head_dim": source.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": source.count("ssm.conv_kernel"),
    }
