"""Models, regimes and devices of the ledger."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.on_gpu.models import SHAPES
from bench.shapes import COMMON, MODELS
from model.config import ModelConfig, read_config

CONTEXT = 16_384
SEQUENCES = 256
"""Most sequences of a step."""
STEP_TOKENS = 8192
"""Most tokens of a step, as in the measured runs, and the default of such GPUs."""


@dataclass(frozen=True, slots=True, eq=False)
class LedgerModel:
    """A model of the ledger.

    Attributes:
        name: Name in tables.
        fields: Fields of its config.json.
        ranks: Devices that the model is divided among.
    """

    name: str
    fields: Mapping[str, Any]
    ranks: int = 1

    @property
    def layers(self) -> int:
        return int(self.fields["num_hidden_layers"])

    def config(self, layers: int) -> ModelConfig:
        """Reads the configuration of a model of so many layers as an engine does."""
        fields = COMMON | {"max_position_embeddings": CONTEXT} | dict(self.fields) | {"num_hidden_layers": layers}
        with tempfile.TemporaryDirectory() as place:
            Path(place, "config.json").write_text(json.dumps(fields))
            return read_config(Path(place))


@dataclass(frozen=True, slots=True)
class Regime:
    """A step in which some sequences get tokens.

    Attributes:
        sequences: Number of sequences.
        before: Tokens that each has in the cache.
        now: Tokens of each in this step.
    """

    sequences: int
    before: int
    now: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.now

    @property
    def is_decode(self) -> bool:
        return self.now == 1

    @property
    def keys(self) -> int:
        """Keys of all sequences together, those of this step included."""
        return self.sequences * (self.before + self.now)

    def __str__(self) -> str:
        if self.is_decode:
            return f"decode, {self.sequences} of {self.before:,}"
        return f"prompt of {self.now:,}"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, by its data sheet.

    Attributes:
        name: Name in tables.
        memory: Bytes a second of its memory.
        multiply: Operations a second of dense bfloat16 products.
        link: Bytes a second that it sends to other devices, and as many that it receives meanwhile.
        capacity: Bytes of its memory.
    """

    name: str
    memory: float
    multiply: float
    link: float
    capacity: float


MULTIPROCESSORS = 132
CLOCK = 1.83e9
"""Cycles a second, at which 132 multiprocessors multiply at the data sheet's rate: 4,096 operations each a cycle."""
ISSUED = 4
"""Instructions that a multiprocessor issues in a cycle."""
H100 = Device("H100 SXM", 3.35e12, 989e12, 450e9, 80e9)
H200 = Device("H200 SXM", 4.8e12, 989e12, 450e9, 141e9)
LLAMA_8B = LedgerModel("Llama 3.1 8B", SHAPES["llama-8b"])
QWEN_30B = LedgerModel("Qwen3-30B-A3B", SHAPES["qwen3-30b-a3b/8"] | {"num_hidden_layers": 48})
LLAMA_70B = LedgerModel(
    "Llama 3.3 70B, a rank of 8",
    SHAPES["llama-8b"]
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
    8,
)
LEDGER = (LLAMA_8B, QWEN_30B, LLAMA_70B)
MEASURED = {
    "llama-8b": LLAMA_8B,
    "qwen3-0.6b": LedgerModel("Qwen3-0.6B", MODELS["qwen3-0.6b"]),
    "qwen3-30b-a3b/8": LedgerModel("Qwen3-30B-A3B, 8 layers", SHAPES["qwen3-30b-a3b/8"]),
}
"""Models of the measured steps, by their names in `bench/results/h200`."""
REGIMES = (
    *(Regime(sequences, before, 1) for before in (1024, 8192) for sequences in (1, 64, 256)),
    Regime(1, 0, 2048),
    Regime(1, 0, 8192),
)
