"""Typed access to a parsed JSON object, with errors that name the file and the key. Imports no torch."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from model.errors import CheckpointError, shown
from model.files import read_file

T = TypeVar("T")

LARGEST = 2**31 - 1
"""Bound of all integers, so that each fits where it is stored (int32 of page tables and token ids)."""

MOST = 2**20
"""Bound of counts (widths, experts, tokens) that have none in `MOST_OF`."""

_VOCABULARY, _CONTEXT, _LAYERS, _HEADS, _SIDE = 2**22, 2**22, 2**10, 2**12, 2**13
MOST_OF = {
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "lm_vocab_size": _VOCABULARY,
    "lm_base_vocab_size": _VOCABULARY,
    "max_position_embeddings": _CONTEXT,
    "original_max_position_embeddings": _CONTEXT,
    "lm_max_position_embeddings": _CONTEXT,
    "sliding_window": LARGEST,  # one that is wider than the context is none
    "num_hidden_layers": _LAYERS,
    "lm_n_blocks": _LAYERS,
    "vit_n_blocks": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_global_key_value_heads": _HEADS,
    "num_kv_heads": _HEADS,
    "lm_n_heads": _HEADS,
    "lm_n_kv_heads": _HEADS,
    "vit_n_heads": _HEADS,
    "head_dim": _HEADS,
    "global_head_dim": _HEADS,
    "num_experts": 2**10,
    "num_local_experts": 2**10,
    "n_routed_experts": 2**10,
    "moe_num_experts": 2**10,
    "image_size": _SIDE,
    "vit_img_size": _SIDE,
    "max_img_size": _SIDE,
    "size": _SIDE,
    "crop_size": _SIDE,
    "height": _SIDE,
    "width": _SIDE,
    "shortest_edge": _SIDE,
    "longest_edge": _SIDE,
    "scale_factor": 2**6,
    "mp_pixel_shuffle_factor": 2**6,
}
"""Bounds by key, about ten times the largest of today's models. They bound a loader's loops and allocations."""

LEAST_FLOAT, MOST_FLOAT = 1e-20, 1e20
"""Bounds of numbers above 0: quotients, products and logarithms of a few of them stay finite."""


class Fields:
    """A JSON object of a file. A key that holds null counts as missing. All methods raise CheckpointError."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns the value of a key, checked to be of type `kind`. An integer counts as a float."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.path}: {key!r} is missing")
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > LARGEST:
                raise self.refuse(key, f"must be in [-{LARGEST}, {LARGEST}]")
            if kind is float:
                value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: {key!r} is {shown(value)}, must be of type {kind.__name__}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return self.get(key, bool, default)

    def positive_float(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0, within bounds that keep results computed from it finite."""
        value = self.get(key, float, default)
        if not 0 < value < math.inf:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, must be a number above 0")
        if not LEAST_FLOAT <= value <= MOST_FLOAT:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, must be in [{LEAST_FLOAT}, {MOST_FLOAT}]")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """Returns a count: at least 1, at most `MOST_OF` of the key or `MOST`."""
        value, most = self.get(key, int, default), MOST_OF.get(key, MOST)
        if value < 1:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, must be at least 1")
        if value > most:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, may be at most {most}")
        return value

    def numbers(self, key: str, least: float, most: float, default: list[float] | None = None) -> list[float]:
        """Returns a list of numbers in [least, most]."""
        values = self.get(key, list, default)
        if not all(isinstance(v, int | float) and not isinstance(v, bool) and least <= v <= most for v in values):
            raise self.refuse(key, f"must be a list of numbers in [{least:g}, {most:g}]")
        return [float(value) for value in values]

    def section(self, key: str) -> "Fields":
        """Returns the object under this key, an empty one where there is none."""
        return Fields(self.path, self.get(key, dict, {}))

    @property
    def rope(self) -> "Fields":
        """The rules of rotary embeddings: 'rope_parameters' (transformers 5), or 'rope_scaling', which wins."""
        old = self.section("rope_scaling")
        return old if old.values else self.section("rope_parameters")

    def having(self, changes: dict[str, Any]) -> "Fields":
        """Returns the same fields with other values for some keys."""
        return Fields(self.path, self.values | changes)

    def refuse(self, key: str, why: str) -> CheckpointError:
        """Makes the error for a value that is not supported."""
        return CheckpointError(f"{self.path}: {key!r} is {shown(self.values.get(key))}, {why}")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: The file is missing, cannot be read (`read_file`), or holds no JSON object.
    """
    try:
        content = read_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: is this a Hugging Face model directory?") from None
    try:
        values = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values
