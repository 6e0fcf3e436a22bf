"""KV of models whose layers differ: other heads in some layers, and layers that read an earlier layer's KV.

The fields are those of Gemma 4. Layers that share KV are of Brandon et al., Reducing Transformer Key-Value Cache Size
with Cross-Layer Attention, 2024. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cache_manager.layout import KVShape
from model.errors import CheckpointError
from model.fields import Fields

DIMS, HEADS = "head_dim", "num_key_value_heads"


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Shapes of KV by layer, and whose KV each layer reads.

    Attributes:
        shapes: See `ModelConfig.kv_shapes`.
        owners: See `ModelConfig.kv_layers`.
    """

    shapes: tuple[KVShape, ...] = ()
    owners: tuple[int, ...] = ()


def read_shapes(fields: Fields, full: Sequence[bool], shape: KVShape) -> tuple[KVShape, ...]:
    """Reads the KV of each layer.

    'per_layer_config' has it as transformers writes it, by number of the layer. Otherwise 'global_head_dim' and, with
    'attention_k_eq_v', 'num_global_key_value_heads' are of the layers without a window.

    Args:
        fields: The model's config.json.
        full: Whether each layer has no window.
        shape: KV of the other layers.

    Raises:
        CheckpointError: A field has a wrong type, or a layer differs in something else.
    """
    if "per_layer_config" in fields:
        own = fields.section("per_layer_config")
        return tuple(_shape_of(own, str(layer), shape) for layer in range(len(full)))
    heads = shape.heads
    if fields.flag("attention_k_eq_v") and "num_global_key_value_heads" in fields:
        heads = fields.positive("num_global_key_value_heads")
    dim = fields.positive("global_head_dim", 512)
    return tuple(KVShape(heads, dim, dim) if one else shape for one in full)


def _shape_of(own: Fields, layer: str, shape: KVShape) -> KVShape:
    said = own.section(layer)
    unknown = sorted(set(said.values) - {DIMS, HEADS})
    if unknown:
        raise CheckpointError(
            f"{own.path}: 'per_layer_config' changes {unknown[0]!r} in layer {layer}; layers may differ in {DIMS!r} "
            f"and {HEADS!r}"
        )
    dim = said.positive(DIMS, shape.key_dim)
    return KVShape(said.positive(HEADS, shape.heads), dim, dim)


def shared_owners(fields: Fields, kinds: Sequence[str], shapes: Sequence[KVShape]) -> tuple[int, ...]:
    """Returns the layer whose KV each layer reads.

    The last 'num_kv_shared_layers' read that of the last layer of their type before them.

    Args:
        fields: The model's config.json.
        kinds: Type of each layer.
        shapes: KV of each layer.

    Raises:
        CheckpointError: No layer before them has their type, or it has other KV.
    """
    count = fields.get("num_kv_shared_layers", int, 0)
    first = len(kinds) - count
    if count < 0 or first < 1:
        raise fields.refuse("num_kv_shared_layers", f"must be 0 .. {len(kinds) - 1}")
    owners = list(range(first))
    for layer in range(first, len(kinds)):
        before = [one for one in range(first) if kinds[one] == kinds[layer]]
        if not before or shapes[before[-1]] != shapes[layer]:
            raise fields.refuse(
                "num_kv_shared_layers", f"no layer before layer {layer} has its type, {kinds[layer]!r}, and its heads"
            )
        owners.append(before[-1])
    return tuple(owners) if count else ()
