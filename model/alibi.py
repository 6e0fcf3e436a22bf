"""Attention with linear biases (ALiBi, Press et al., 2022): a score falls with the distance of the key. No torch."""

import math

from model.fields import Fields

MOST = 8.0  # power of two of the last head's slope, with a minus


def alibi_slopes(heads: int, most: float = MOST) -> tuple[float, ...]:
    """Returns the slope of each head: what a score loses for each token between query and key.

    They are a geometric sequence down to 2^-most. Where the number of heads is no power of two, the slopes of the next
    lower one come first, then every other slope of the next higher one.

    Args:
        heads: The number of query heads.
        most: See above.
    """
    whole = 2 ** math.ceil(math.log2(heads))
    slopes = tuple(2.0 ** (-most * number / whole) for number in range(1, whole + 1))
    return slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads]


def slopes_of_bloom(fields: Fields, heads: int) -> tuple[float, ...]:  # noqa: ARG001
    return alibi_slopes(heads)


def slopes_of_mpt(fields: Fields, heads: int) -> tuple[float, ...]:
    return alibi_slopes(heads, fields.section("attn_config").positive_float("alibi_bias_max", MOST))


MPT_NAMES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
"""Keys of an MPT's config.json, and those of other families."""


def said_of_mpt(fields: Fields) -> Fields:
    """Returns MPT's config.json in the words of other families.

    Raises:
        CheckpointError: Its attention is none with linear biases alone, or logits have a factor.
    """
    attention = fields.section("attn_config")
    for key, served in (("alibi", True), ("prefix_lm", False), ("qk_ln", False)):
        if attention.flag(key, served) != served:
            raise attention.refuse(key, f"must be {served}")
    if not fields.flag("no_bias", True):
        raise fields.refuse("no_bias", "must be True")
    for of, key in ((attention, "clip_qkv"), (fields, "logit_scale")):
        if of.values.get(key) is not None:
            raise of.refuse(key, "which is not supported")
    said = {new: fields.values[old] for old, new in MPT_NAMES.items() if old in fields}
    if "softmax_scale" in attention:
        return fields.having(said | {"attention_multiplier": attention.positive_float("softmax_scale")})
    plain = Fields(fields.path, said)
    return fields.having(
        said | {"attention_multiplier": (plain.positive("hidden_size") / plain.positive("num_attention_heads")) ** -0.5}
    )
