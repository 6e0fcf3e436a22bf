"""Weights as GGUF files hold them: each linear in a type of its own, most of them blocks of small integers.

Parts of one product may be in several types, as the values of Q4_K_M are beside its queries and keys. Each part keeps
its own; those in groups are one product, and plain parts stand beside it.
"""

from collections.abc import Sequence
from itertools import groupby
from math import lcm
from typing import Self

import torch
from torch import Tensor

from model.embedding_table import EightBitRows
from model.errors import CheckpointError, shown
from model.fields import Fields
from model.forward import ForwardBatch
from model.gguf.types import BY_NAME, TensorType
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.gguf_blocks import unpack
from model.weight_formats.groups import GroupProducts, GroupWeights, NotGrouped, blocks_of, eight_bit_rows
from model.weight_formats.plain import PLAIN, PlainFormat, PlainWeights
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight
from model.weight_formats.tiles import HeadTiles, inputs_together

NAME = "gguf"
TILED = ".linear_attn.out_proj"  # linears whose inputs stand in llama.cpp's order where heads do


def groups_of(weight: StoredWeight) -> GroupWeights:
    """Unpacks a linear in blocks, or some of its outputs and inputs. Raises NotGrouped for a plain one."""
    (one,) = weight.described
    if one.key not in BY_NAME:
        raise NotGrouped(f"{weight.name} is stored plain, beside parts of its product that are in blocks")
    data = weight[one.key]
    return unpack(data.reshape(len(data), -1, BY_NAME[one.key].size), one.key)


class Beside:
    """A product whose outputs several products make, one after the other."""

    def __init__(self, parts: Sequence[MadeProduct]) -> None:
        self._parts = parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        return torch.cat([part(x, batch) for part in self._parts], 1)


class GGUFFormat(PlainWeights):
    """`WeightFormat` of a GGUF file. Linears that it does not list are plain."""

    name = NAME

    def __init__(self, options: Fields) -> None:
        """Reads the types of the linears.

        Args:
            options: `types` has the name of the type of each linear. `tiled_inputs` has the numbers of `HeadTiles`
                where inputs of `TILED` must be put in the hub's order.

        Raises:
            CheckpointError: It is no type that is served.
        """
        named = options.get("types", dict)
        if unknown := [kind for kind in named.values() if kind not in BY_NAME]:
            raise CheckpointError(f"{options.path}: type {shown(unknown[0])} is not served")
        kinds = {kind: _format_of(BY_NAME[kind], self) for kind in sorted(set(named.values()))}
        self._kinds = {name: kinds[kind] for name, kind in named.items()}
        tiled = options.get("tiled_inputs", list, [])
        self._tiles = HeadTiles(*tiled) if tiled else None
        self._products = GroupProducts()
        # No inputs of an embedding or an output layer are cut.
        layers = {kind for name, kind in named.items() if any(part.isdecimal() for part in name.split("."))}
        self.blocks = Blocks(columns=lcm(*(BY_NAME[kind].block for kind in layers)))

    def for_linear(self, name: str) -> WeightFormat:  # type: ignore[override]
        return self._kinds.get(name, PLAIN)

    def for_tied(self, name: str) -> WeightFormat:
        """Returns the type of the embedding, which the output layer is read in too."""
        return self._kinds.get(name, PLAIN)

    def groups(self, weight: StoredWeight) -> GroupWeights:
        """Unpacks a linear of a type in blocks, see `GroupFormat`."""
        made = groups_of(weight)
        if self._tiles is None or not weight.name.endswith(TILED):
            return made
        return inputs_together(made, self._tiles, weight.name)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        made, first = [], 0
        for plain, run in groupby(weights, lambda weight: weight.described[0].key not in BY_NAME):
            parts = list(run)
            last = first + sum(part.outputs for part in parts)
            own = None if bias is None else bias[first:last]
            made.append(
                PLAIN.product(parts, own, dtype, device)
                if plain
                else self._products.product(self, parts, own, dtype, device)
            )
            first = last
        return made[0] if len(made) == 1 else Beside(made)


class GGUFType:
    """`JointFormat` of the linears of one type in a file."""

    name = NAME

    def __init__(self, kind: TensorType, joint: GGUFFormat) -> None:
        """Makes the format; `joint` makes its products."""
        self._kind, self.joint = kind, joint
        self.blocks = Blocks(columns=kind.block)

    def for_linear(self, name: str) -> Self:  # noqa: ARG002
        return self

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        kind = self._kind
        if width % kind.block:
            raise CheckpointError(f"{width} inputs are no multiple of {kind.block}, which {kind.name} keeps together")
        shape, columns = (out, width // kind.block * kind.size), Axis(1, kind.block, kind.size)
        return (StoredTensor(kind.name, shape, torch.uint8, Axis(0), columns, ".weight"),)

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        """Returns nothing: `model.gguf_weights` names each expert of a tensor that holds them all."""
        return ()

    def groups(self, weight: StoredWeight) -> GroupWeights:
        return self.joint.groups(weight)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self.joint.product(weights, bias, dtype, device)

    def embedding(self, weight: StoredWeight, device: torch.device) -> EightBitRows:
        return eight_bit_rows(map(groups_of, blocks_of(weight)), weight.outputs, device)


class PlainType(PlainFormat):
    """`JointFormat` of the linears of a file that are plain."""

    def __init__(self, joint: GGUFFormat) -> None:
        """Makes the format; `joint` makes products of which other parts are in blocks."""
        self.joint = joint

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        return ()


def _format_of(kind: TensorType, joint: GGUFFormat) -> WeightFormat:
    return PlainType(joint) if kind.is_plain else GGUFType(kind, joint)
