"""Reads the metadata and small tensors of a GGUF file that describe its architecture. Imports no torch."""

from dataclasses import dataclass

import numpy as np

from model.errors import CheckpointError
from model.gguf.split import GGUFModel

MOST_FACTORS = 2**12


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A file whose configuration is read.

    Attributes:
        model: The file or files.
        prefix: Its architecture, which most keys begin with.
    """

    model: GGUFModel
    prefix: str

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.model.metadata

    def count(self, key: str, default: int | None = None) -> int:
        return self.model.metadata.count(f"{self.prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.model.metadata.fields.positive_float(f"{self.prefix}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        return self.model.metadata.fields.flag(f"{self.prefix}.{key}", default)

    def text(self, key: str, default: str) -> str:
        return self.model.metadata.fields.get(f"{self.prefix}.{key}", str, default)

    def factors(self, tensor: str) -> list[float] | None:
        """Returns the numbers of a small tensor of float32. None where there is none."""
        one = self.model.tensors.get(tensor)
        if one is None:
            return None
        if one.type.name != "F32" or len(one.shape) != 1 or one.shape[0] > MOST_FACTORS:
            raise CheckpointError(
                f"{one.file.path}: tensor {tensor} is {one.type.name} of shape {list(one.shape)}, must be F32 of one "
                f"dimension, of at most {MOST_FACTORS}"
            )
        numbers: list[float] = one.bytes().view(np.float32).tolist()
        return numbers
