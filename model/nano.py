"""Reads config.json of nanoVLM (github.com/huggingface/nanoVLM) into the names of transformers' config files.

Imports no torch. nanoVLM saves no tokenizer beside its weights, and takes one from the Hub. Quire needs it in the
directory: `save_pretrained` of the one that nanoVLM's `get_tokenizer` returns writes it, with 'vlm_extra_tokens'.
"""

from pathlib import Path
from typing import Any

from model.errors import CheckpointError
from model.fields import LARGEST, Fields, read_json
from model.multimodal import NANO, TowerShape, Vision, check_tower

NO_PLACEHOLDER = 0
"""Stands for image features where the vocabulary has no token for them. Features replace it before any look-up."""


def is_nano(fields: Fields) -> bool:
    return "architectures" not in fields and "vit_hidden_dim" in fields and "lm_hidden_dim" in fields


def read_nano_text(fields: Fields, directory: Path) -> Fields:
    """Returns the fields that a Llama's config.json would hold for the language model.

    nanoVLM's rope scales with the length of a sequence past 'lm_max_position_embeddings'. Cached keys would have to be
    rotated again, so the context ends there.

    Raises:
        CheckpointError: A field is missing or wrong.
    """
    hidden, heads = fields.positive("lm_hidden_dim"), fields.positive("lm_n_heads")
    values: dict[str, Any] = {
        "vocab_size": fields.positive("lm_vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.positive("lm_inter_dim"),
        "num_hidden_layers": fields.positive("lm_n_blocks"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.positive("lm_n_kv_heads", heads),
        "max_position_embeddings": fields.positive("lm_max_position_embeddings"),
        "rms_norm_eps": fields.positive_float("lm_rms_eps"),
        "rope_theta": fields.positive_float("lm_re_base"),
        "tie_word_embeddings": fields.flag("lm_tie_weights", True),
        "dtype": fields.get("dtype", str, "float32"),
        "eos_token_id": _end(fields, directory),
    }
    return Fields(fields.path, values)


def read_nano_vision(fields: Fields, directory: Path) -> Vision:
    """Reads the vision part of a model.

    Raises:
        CheckpointError: A field is missing or wrong, or the encoder is not supported.
    """
    if fields.flag("vit_cls_flag"):
        raise fields.refuse("vit_cls_flag", "but an encoder with one feature an image is not supported")
    tower = TowerShape(
        NANO,
        fields.positive("vit_hidden_dim"),
        fields.positive("vit_inter_dim"),
        fields.positive("vit_n_blocks"),
        fields.positive("vit_n_heads"),
        fields.positive("vit_img_size"),
        fields.positive("vit_patch_size"),
        fields.positive_float("vit_ln_eps"),
        "gelu_pytorch_tanh",
    )
    check_tower(fields.path.name, tower)
    return Vision(NANO, _placeholder(fields, directory), False, tower, fields)


def _placeholder(fields: Fields, directory: Path) -> int:
    """Returns the placeholder's id, as the tokenizer has it.

    Without a tokenizer it is nanoVLM's own: extra tokens follow the base vocabulary in their order.
    """
    extra = fields.section("vlm_extra_tokens")
    if "image_token" not in extra:
        return NO_PLACEHOLDER
    found = _added(directory, extra.get("image_token", str))
    if found is not None:
        return found
    base = fields.positive("lm_vocab_size") - fields.positive("extra_token_amount", len(extra.values))
    return fields.positive("lm_base_vocab_size", base) + list(extra.values).index("image_token")


def _end(fields: Fields, directory: Path) -> object:
    """Returns the id of the token that ends a text, None where there is none.

    The tokenizer's files win over config.json, which has it in the first version alone.
    """
    config = directory / "tokenizer_config.json"
    end = read_json(config).get("eos_token") if config.exists() else None
    end = end.get("content") if isinstance(end, dict) else end
    found = _added(directory, end)
    return fields.values.get("lm_eos_token_id") if found is None else found


def _added(directory: Path, text: object) -> int | None:
    """Returns the id of an added token of tokenizer.json. None where it has no such token, or does not exist."""
    path = directory / "tokenizer.json"
    added = read_json(path).get("added_tokens", []) if path.exists() else []
    if not isinstance(added, list):
        raise CheckpointError(f"{path}: 'added_tokens' is no list")
    ids = [token.get("id") for token in added if isinstance(token, dict) and token.get("content") == text]
    return ids[0] if ids and isinstance(ids[0], int) and 0 <= ids[0] <= LARGEST else None
