"""Shape of multi-head latent attention, which keeps one vector for all heads of a token. Imports no torch."""

import math
from dataclasses import dataclass

from cache_manager.layout import KVShape
from model.fields import Fields


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Shape of multi-head latent attention (DeepSeek-V2, 2024).

    A head's key is what a product makes of the token's latent, and a rotated part that all heads share. Its value is
    what another product makes of the latent. In the absorbed form, which this one is, the first product is applied to
    queries and the second one to the mixed latents. So a token's KV is its latent and the rotated part: one key for all
    heads, whose first elements are its value too.

    Attributes:
        rank: Elements of the latent.
        rotated: Elements of the rotated part.
        plain: Elements of a head's query that are not rotated.
        value_dim: Elements of a head's value.
        query_rank: Width between the two products that make queries. None: one product makes them.
        scale: Factor of scores.
    """

    rank: int
    rotated: int
    plain: int
    value_dim: int
    query_rank: int | None
    scale: float

    @property
    def key_dim(self) -> int:
        """Elements of a token's KV."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Elements of a head's query before the product with its part of the latent's."""
        return self.plain + self.rotated

    @property
    def kv(self) -> KVShape:
        return KVShape(1, self.key_dim, self.rank, latent=True)


def read_latent_shape(fields: Fields, plain: int = 128, rank: int = 512) -> LatentShape:
    """Reads the shape of DeepSeek's attention.

    Args:
        fields: The model's config.json.
        plain: Value of 'qk_nope_head_dim' where it has none.
        rank: Value of 'kv_lora_rank', likewise.

    Raises:
        CheckpointError: A value is out of its range.
    """
    plain, rotated = fields.positive("qk_nope_head_dim", plain), fields.positive("qk_rope_head_dim", 64)
    query_rank = fields.positive("q_lora_rank") if fields.values.get("q_lora_rank") is not None else None
    scale, rope = (plain + rotated) ** -0.5, fields.rope
    if rope.get("rope_type", str, rope.get("type", str, "default")) != "default" and rope.values.get("mscale_all_dim"):
        factor, warmth = rope.positive_float("factor"), rope.positive_float("mscale_all_dim")
        scale *= (0.1 * warmth * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
    rank, value_dim = fields.positive("kv_lora_rank", rank), fields.positive("v_head_dim", 128)
    return LatentShape(rank, rotated, plain, value_dim, query_rank, scale)


MISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rules of Mistral 4's rotation where config.json has none."""


def with_mistral_rope(fields: Fields) -> Fields:
    """Returns the fields of a Mistral 4 with its rules of rotation, which tell the part of a head that is rotated."""
    if not fields.rope.values:
        fields = fields.having({"rope_parameters": MISTRAL_ROPE})
    # 'partial_rotary_factor' is the rotated part of the plain and the rotated elements: 'qk_rope_head_dim' says it too.
    whole = {"partial_rotary_factor": 1.0}
    return fields.having({"rope_scaling": fields.rope.values | whole})


def read_mistral_shape(fields: Fields) -> LatentShape:
    """Reads the shape of Mistral 4's attention. Raises CheckpointError."""
    return read_latent_shape(with_mistral_rope(fields), 64, 256)
