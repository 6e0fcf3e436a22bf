"""compressed-tensors, as LLM Compressor writes it and vLLM serves it: schemes of quantization by name of a linear.

Activations that a scheme quantizes are rounded row by row, see `model.weight_formats.activations`.
"""

from collections.abc import Sequence
from math import lcm

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.fields import Fields
from model.weight_formats.compressed_tensors_scheme import read_scheme
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.groups import GroupProducts
from model.weight_formats.names import NameList
from model.weight_formats.plain import PLAIN
from model.weight_formats.stored import StoredTensor, StoredWeight

LINEAR = "Linear"
"""Class of all linears; a target that is the name of another class has none."""

MOST_GROUPS = 256


class CompressedTensors:
    """`WeightFormat`. A linear that no scheme is for, or that is ignored, is plain.

    Attributes:
        schemes: Formats of the schemes, in the order of config.json.
    """

    name = "compressed-tensors"

    def __init__(self, options: Fields) -> None:
        """Reads 'quantization_config'. Raises CheckpointError for what is not served."""
        _check_whole(options)
        self._ignored = NameList(options, "ignore")
        products, form = GroupProducts(), options.get("format", str, "mixed-precision")
        sections = options.section("config_groups")
        if not 1 <= len(sections.values) <= MOST_GROUPS:
            raise options.refuse("config_groups", f"must have 1 to {MOST_GROUPS} groups")
        groups = [(name, sections.section(name)) for name in sections.values]
        self._targets = [_read_targets(group) for _, group in groups]
        self.schemes: Sequence[WeightFormat] = [
            read_scheme(group, f"{self.name} {name}", form, products) for name, group in groups
        ]
        self.blocks = Blocks(
            lcm(*(scheme.blocks.rows for scheme in self.schemes)),
            lcm(*(scheme.blocks.columns for scheme in self.schemes)),
        )

    def for_linear(self, name: str) -> WeightFormat:
        """Returns the scheme whose targets have the name; or else the class, which all have."""
        if name in self._ignored or self._ignored.names(LINEAR):
            return PLAIN
        for targets, scheme in zip(self._targets, self.schemes, strict=True):
            if name in targets:
                return scheme
        for targets, scheme in zip(self._targets, self.schemes, strict=True):
            if targets.names(LINEAR):
                return scheme
        return PLAIN

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        """Returns what a linear of the first scheme is stored in."""
        return self.schemes[0].tensors(out, width)

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        return ()

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        """Makes a product of the first scheme."""
        return self.schemes[0].product(weights, bias, dtype, device)


def _read_targets(group: Fields) -> NameList:
    targets = NameList(group, "targets")
    for name in targets:
        if "embedding" in name.lower():
            raise group.refuse("targets", "embeddings must be plain: use a checkpoint that quantizes Linear alone")
    return targets


def _check_whole(options: Fields) -> None:
    """Raises CheckpointError for what changes the meaning of all schemes."""
    status = options.get("quantization_status", str, "compressed")
    if status != "compressed":
        raise options.refuse("quantization_status", "must be 'compressed': save the model with save_compressed=True")
    sparsity = options.section("sparsity_config")
    if sparsity.get("format", str, "dense") != "dense":
        raise sparsity.refuse(
            "format", "of 'sparsity_config': sparse weights are not served; use one without, as W4A16"
        )
    for key, what in (("transform_config", "rotations of weights"), ("moe_sparsity_config", "experts left out")):
        changes = options.section(key).values
        if any(changes.values()):
            raise CheckpointError(
                f"{options.path}: {key!r} is set: {what} are not served; use the model in W4A16 or FP8 without them"
            )
