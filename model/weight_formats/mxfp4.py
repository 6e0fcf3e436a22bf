"""MXFP4 experts as gpt-oss ships them: FP4 numbers (e2m1) in groups of 32 with a power of two for each.

Layout: OCP Microscaling Formats 1.0 and transformers' integrations/mxfp4.py. `{name}_blocks` uint8 [experts, out,
groups, 16] has two numbers a byte, the first in the lower half. `{name}_scales` uint8 [experts, out, groups] has
exponents with a bias of 127 (e8m0). Only experts lie so, all of a layer in one tensor; other linears are plain.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.fields import Fields
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.groups import GroupProducts, GroupWeights
from model.weight_formats.levels import E2M1, unpack_bits
from model.weight_formats.names import ModuleList
from model.weight_formats.plain import PLAIN
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight

GROUP = 32
NOT_A_NUMBER = 255  # of e8m0


class Mxfp4:
    """`GroupFormat`."""

    name = "mxfp4"
    blocks = Blocks(columns=GROUP)

    def __init__(self, options: Fields) -> None:
        """Reads 'quantization_config'. Raises CheckpointError."""
        self._plain = ModuleList(options, ("modules_to_not_convert",))
        self._products = GroupProducts()

    def for_linear(self, name: str) -> WeightFormat:
        return self if "experts" in name.split(".") and name not in self._plain else PLAIN

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        """Returns the tensors of an expert, which `quire estimate` asks for one by one."""
        return self.stacked(out, width)

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:
        if width % GROUP:
            raise CheckpointError(f"{width} inputs of an expert are no multiple of {GROUP}, which mxfp4 needs")
        rows, columns = Axis(0), Axis(1, GROUP)
        return (
            StoredTensor("blocks", (out, width // GROUP, GROUP // 2), torch.uint8, rows, columns, "_blocks"),
            StoredTensor("scales", (out, width // GROUP), torch.uint8, rows, columns, "_scales"),
        )

    def groups(self, weight: StoredWeight) -> GroupWeights:
        exponents = weight["scales"]
        if not exponents.is_meta and (exponents == NOT_A_NUMBER).any():
            raise CheckpointError(f"{weight.name}_scales holds {NOT_A_NUMBER}, which is not a number")
        values = unpack_bits(weight["blocks"].flatten(1), 4, weight.inputs)
        # bfloat16 has the exponents of float32, and so holds all of these powers of two.
        scales = exponents.contiguous().view(torch.float8_e8m0fnu).float().bfloat16()
        return GroupWeights(E2M1, values, scales, None, GROUP)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._products.product(self, weights, bias, dtype, device)
