"""Reads the metadata and small tensors of a GGUF file that describe its architecture. Imports no torch."""

from dataclasses import dataclass

import numpy as np

from model.errors import CheckpointError
from model.gguf.split import GGUFModel

MOST_FACTORS = 2**12


@dataclass(frozen=True, slots=True, eq=False)
class ConfigSource:
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

    def by_layer(self, key: str, layers: int, default: int | None = None, least: int = 1) -> list[int]:
        """Returns a count for each layer, at least `least`, of a key that has one for all of them or one for each.

        Raises:
            CheckpointError: It has others, or a number of them that is not that of the layers.
        """
        metadata, full = self.model.metadata, f"{self.prefix}.{key}"
        if full in metadata.fields or full not in metadata:
            return [self.count(key, default)] * layers
        counts = metadata.integers(full)
        if len(counts) != layers or min(counts) < least:
            raise CheckpointError(f"{metadata.path}: {full!r} must have {layers} numbers of at least {least}")
        return counts

    def flags(self, key: str, layers: int) -> list[bool]:
        """Returns a flag for each layer. Raises CheckpointError where there are others, or more or fewer."""
        metadata, full = self.model.metadata, f"{self.prefix}.{key}"
        flags = metadata.flags(full)
        if len(flags) != layers:
            raise CheckpointError(f"{metadata.path}: {full!r} has {len(flags)} values for {layers} layers")
        return flags

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
