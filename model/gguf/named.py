"""A tensor of a GGUF file under its name on the Hugging Face hub, and how an architecture's names are told.

Some weights are stored in another order or with another offset than on the hub; `Change` says how to undo that. Imports
no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from model.gguf.reader import TensorInfo


class Change(Enum):
    """The difference between a stored tensor and the hub's."""

    NONE = auto()
    PAIRED_QUERIES = auto()  # rows of each head in the order of pairs that rotate together, not of halves
    PAIRED_KEYS = auto()
    PLUS_ONE = auto()  # weights of norms stand for themselves, not for 1 + w
    CHANNELS = auto()  # [channels, taps] or [1, channels, 1, taps], on the hub [channels, 1, taps]; not of biases
    TILED = auto()  # value heads that share a key head are apart, see `model.weight_formats.tiles`
    TILED_INPUTS = auto()
    TILED_AFTER_KEYS = auto()  # so are the last outputs, behind all queries and keys
    TILED_CHANNELS = auto()  # both this and CHANNELS
    FLAT = auto()  # [n], on the hub [1, n]
    IN_COLUMNS = auto()  # [n, 1], [1, 1, n, 1] or [groups, n / groups], on the hub [n]
    LYING = auto()  # [out, in], on the hub [in, out]
    QKV_APART = auto()  # queries, keys and values each together, on the hub head by head


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under its name on the hub.

    Attributes:
        name: Name on the hub.
        tensor: The tensor in the file.
        change: See `Change`.
        expert: Index in a tensor that holds all experts of a layer. None for a tensor of its own.
        half: Which half of an expert's rows this is, 0 or 1. None for all rows.
    """

    name: str
    tensor: TensorInfo
    change: Change = Change.NONE
    expert: int | None = None
    half: int | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Names of an architecture's tensors, without `.weight` and `.bias`.

    Attributes:
        block: Names in a layer, by those in the file.
        experts: Names of the parts of an expert, by those in the file; "{}" stands for its index.
        changes: Changes, by names in the file.
        whole: Names in a layer that end otherwise, by those in the file, with their ends.
        layers: Prefix of a layer; "{}" stands for its index.
        top: Other names.
    """

    block: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers.{}."
    top: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
