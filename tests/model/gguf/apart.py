"""Tensors of a checkpoint that llama.cpp's converter writes as several, and back."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Apart:
    """A tensor that is written as several.

    Attributes:
        pattern: End of its name.
        names: What stands there in the names of its parts.
        cut: Returns the parts.
        join: Undoes it.
    """

    pattern: str
    names: tuple[str, ...]
    cut: Callable[[Config, Array], Sequence[Array]]
    join: Callable[[Config, Sequence[Array]], Array]

    def parts(self, config: Config, name: str, data: Array) -> dict[str, Array]:
        names = [re.sub(self.pattern, one, name) for one in self.names]
        return dict(zip(names, self.cut(config, data), strict=True))


def _neighbours(parts: Sequence[Array]) -> Array:
    return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)


def _lying(data: Array) -> Array:
    return data.swapaxes(-1, -2)


GPT_OSS = (
    Apart(
        r"gate_up_proj$", ("gate_proj.weight", "up_proj.weight"),
        lambda _, data: (_lying(data)[:, ::2], _lying(data)[:, 1::2]),
        lambda _, parts: _neighbours([_lying(part) for part in parts]),
    ),
    Apart(
        r"gate_up_proj_bias$", ("gate_proj.bias", "up_proj.bias"),
        lambda _, data: (data[:, ::2], data[:, 1::2]),
        lambda _, parts: _neighbours(parts),
    ),
    Apart(r"down_proj$", ("down_proj.weight",), lambda _, data: (_lying(data),), lambda _, parts: _lying(parts[0])),
    Apart(r"down_proj_bias$", ("down_proj.bias",), lambda _, data: (data,), lambda _, parts: parts[0]),
)  # fmt: skip


def _shape(config: Config) -> tuple[int, int, int, int]:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return keys, config["linear_key_head_dim"], values // keys, config["linear_value_head_dim"]


def _by_kind(config: Config, data: Array) -> tuple[Array, Array]:
    """Qwen 3 Next: of each key head its query, key, values and gates; returns all of a kind together, gates apart."""
    heads, dim, each, value_dim = _shape(config)
    by_head = data.reshape(heads, -1, data.shape[1])
    cuts = (dim, 2 * dim, 2 * dim + each * value_dim)
    *qkv, z = (part.reshape(-1, data.shape[1]) for part in np.split(by_head, cuts, 1))
    return np.concatenate(qkv), z


def _by_head(config: Config, parts: Sequence[Array]) -> Array:
    heads, dim, *_ = _shape(config)
    kinds = [*np.split(parts[0], (heads * dim, 2 * heads * dim)), parts[1]]
    by_head = np.concatenate([kind.reshape(heads, -1, kind.shape[1]) for kind in kinds], 1)
    return by_head.reshape(-1, by_head.shape[2])


def tiled(config: Config, name: str, data: Array, back: bool = False) -> Array:
    """Qwen 3.5: value heads of the same place under their key heads together; `back` undoes it."""
    heads, dim, each, _ = _shape(config)
    order = (each, heads) if back else (heads, each)

    def turned(part: Array) -> Array:
        return part.reshape(*order, -1, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    if "out_proj" in name:
        return turned(data.T).T
    first = 2 * heads * dim if "qkv" in name or "conv1d" in name else 0
    return np.concatenate((data[:first], turned(data[first:])))


LLAMA4 = (
    Apart(
        r"gate_up_proj$", ("gate_proj.weight", "up_proj.weight"),
        lambda _, data: np.split(_lying(data), 2, 1),
        lambda _, parts: _lying(np.concatenate(parts, 1)),
    ),
    Apart(
        r"experts\.down_proj$", ("experts.down_proj.weight",),
        lambda _, data: (_lying(data),), lambda _, parts: _lying(parts[0]),
    ),
)  # fmt: skip
QWEN3_NEXT = (Apart(r"in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), _by_kind, _by_head),)
GRANITE_MOE = (
    Apart(
        r"input_linear\.weight$", ("experts.w1.weight", "experts.w3.weight"),
        lambda _, data: np.split(data, 2, 1),
        lambda _, parts: np.concatenate(parts, 1),
    ),
)  # fmt: skip
GRANITE_HYBRID = (
    Apart(
        r"block_sparse_moe\.input_linear\.weight$",
        ("block_sparse_moe.experts.w1.weight", "block_sparse_moe.experts.w3.weight"),
        lambda _, data: np.split(data, 2, 1),
        lambda _, parts: np.concatenate(parts, 1),
    ),
    Apart(
        r"shared_mlp\.input_linear\.weight$",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        lambda _, data: np.split(data, 2),
        lambda _, parts: np.concatenate(parts),
    ),
)
APART = {
    "gpt-oss": GPT_OSS,
    "granitemoe": GRANITE_MOE,
    "granitehybrid": GRANITE_HYBRID,
    "llama4": LLAMA4,
    "qwen3next": QWEN3_NEXT,
}
"""By architecture in the file."""


def find_apart(architecture: str, name: str) -> Apart | None:
    return next((one for one in APART.get(architecture, ()) if re.search(one.pattern, name)), None)
