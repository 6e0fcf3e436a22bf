"""One scheme of a compressed-tensors checkpoint: what its weights and activations are, and the tensors that hold them.

Layout: github.com/vllm-project/compressed-tensors, compressors/pack_quantized and compressors/naive_quantized.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Self

import torch
from torch import Tensor

from model.errors import CheckpointError, shown
from model.fields import Fields
from model.weight_formats.activations import RoundedFormat, RowRounding
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.groups import ROWS, GroupProducts, GroupWeights
from model.weight_formats.levels import E4M3, INT4, INT8, Levels
from model.weight_formats.plain import PLAIN
from model.weight_formats.scales import ScaleLayout, finite_scales, float8_values
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight
from model.weight_formats.words import WORD, unpack_words, zero_offsets

SERVED = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""Types of weights, by format."""

OTHERS = {
    "dense": "its weights are not quantized yet: save it compressed",
    "marlin-24": "its weights are sparse, for one kernel of GPUs: use one in pack-quantized without sparsity",
    "sparse-24-bitmask": "its weights are sparse: use one without sparsity, as W4A16 or FP8",
    "sparse-bitmask": "its weights are sparse: use one without sparsity, as W4A16 or FP8",
    "nvfp4-pack-quantized": "use the model in W4A16 (pack-quantized) or FP8 (float-quantized)",
    "mxfp4-pack-quantized": "use the model in W4A16 (pack-quantized) or FP8 (float-quantized)",
    "mxfp6-pack-quantized": "use the model in FP8 (float-quantized)",
    "mxfp8-quantized": "use the model in FP8 (float-quantized)",
    "mixed-precision": "and a group of 'config_groups' names no format of its own",
}
"""Formats that are not served, and what could be done."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Weights of a scheme.

    Attributes:
        bits: Bits of a weight.
        packed: Whether weights lie in words of 32 bits.
        floating: Whether weights are float8 e4m3; integers otherwise.
        symmetric: Whether 0 stands for 0. Otherwise zero points are stored.
        scales: Layout of the scales.
    """

    bits: int
    packed: bool
    floating: bool
    symmetric: bool
    scales: ScaleLayout

    @property
    def levels(self) -> Levels:
        if self.floating:
            return E4M3
        return INT4 if self.packed and self.bits == 4 else INT8


class SchemeFormat:
    """`GroupFormat` of a scheme's weights."""

    def __init__(self, name: str, scheme: WeightScheme, products: GroupProducts) -> None:
        self.name = name
        self._scheme, self._products = scheme, products
        scales = scheme.scales
        word = WORD // scheme.bits if scheme.packed else 1
        rows = lcm(scales.rows or 1, 1 if scheme.symmetric else word)
        self.blocks = Blocks(rows, lcm(word, scales.columns or 1) if scales.ordered else word)

    def for_linear(self, name: str) -> Self:  # noqa: ARG002
        return self

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        scheme, rows = self._scheme, Axis(0)
        made = [scheme.scales.described("weight_scale", out, width)]
        if scheme.packed:
            word = WORD // scheme.bits
            made += [
                StoredTensor("weight_packed", (out, -(-width // word)), torch.int32, rows, Axis(1, word)),
                StoredTensor("weight_shape", (2,), torch.int64),
            ]
        else:
            dtype = torch.float8_e4m3fn if scheme.floating else torch.int8
            made.append(StoredTensor("weight", (out, width), dtype, rows, Axis(1)))
        if not scheme.symmetric:
            made.append(self._zero_points(out, width))
        if not scheme.scales.ordered:
            made.append(StoredTensor("weight_g_idx", (width,), torch.int32, None, Axis(0)))
        return made

    def _zero_points(self, out: int, width: int) -> StoredTensor:
        """Describes zero points. Packed ones lie along the outputs."""
        layout = self._scheme.scales
        if not self._scheme.packed:
            return layout.described("weight_zero_point", out, width, torch.int8)
        word, columns = (
            WORD // self._scheme.bits,
            Axis(1, layout.columns) if layout.columns and layout.ordered else None,
        )
        return StoredTensor(
            "weight_zero_point", (-(-out // word), layout.groups(width)), torch.int32, Axis(0, word), columns
        )

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        """Returns nothing: experts are saved one by one."""
        return ()

    def groups(self, weight: StoredWeight) -> GroupWeights:
        scheme = self._scheme
        if scheme.packed:
            _check_shape(weight, WORD // scheme.bits)
        scales = scheme.scales.of_outputs(finite_scales(weight, "weight_scale"), weight.outputs)
        offsets = None if scheme.symmetric else zero_offsets(-self._zeros(weight).to(torch.int16), scheme.bits)
        index = None if scheme.scales.ordered else _group_of_inputs(weight, scales.shape[1])
        size = weight.inputs if scheme.scales.columns is None else scheme.scales.columns
        return GroupWeights(scheme.levels, self._values(weight), scales, offsets, size, index)

    def _values(self, weight: StoredWeight) -> Tensor:
        """Returns the weights as integers above 0, [out, in] uint8."""
        if self._scheme.floating:
            return float8_values(weight)
        if self._scheme.packed:
            return unpack_words(weight["weight_packed"], self._scheme.bits)[:, : weight.inputs]
        return weight["weight"].view(torch.uint8) ^ 128  # two's complement to offset binary

    def _zeros(self, weight: StoredWeight) -> Tensor:
        """Returns zero points, [out, groups], signed as the weights are."""
        stored = weight["weight_zero_point"]
        if not self._scheme.packed:
            return self._scheme.scales.of_outputs(stored, weight.outputs)
        bits = self._scheme.bits
        return unpack_words(stored.T, bits)[:, : weight.outputs].T.to(torch.int16) - (1 << bits - 1)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._products.product(self, weights, bias, dtype, device)


def _check_shape(weight: StoredWeight, word: int) -> None:
    """Raises CheckpointError where 'weight_shape' is not that of the packed weights."""
    stored = weight["weight_shape"]
    if stored.is_meta:
        return
    out, width = stored.tolist()
    packed = next(one.shape for one in weight.described if one.key == "weight_packed")
    cut = weight["weight_packed"].shape[1] != packed[1]
    if (out, -(-width // word)) != packed or not (cut or width == weight.inputs):
        raise CheckpointError(
            f"{weight.name}.weight_shape is {[out, width]}, config.json needs {packed[0]} outputs and "
            f"{'about ' if cut else ''}{packed[1] * word if cut else weight.inputs} inputs"
        )


def _group_of_inputs(weight: StoredWeight, count: int) -> Tensor:
    """Returns the group of each input, int64. Raises CheckpointError for one that does not exist."""
    index = weight["weight_g_idx"]
    if not index.is_meta and not ((index >= 0) & (index < count)).all():
        raise CheckpointError(
            f"{weight.name}.weight_g_idx holds {int(index.min())} to {int(index.max())}, "
            f"must be groups 0 to {count - 1}"
        )
    return index.long()


def read_scheme(group: Fields, name: str, form: str, products: GroupProducts) -> WeightFormat:
    """Reads one of 'config_groups'.

    Args:
        group: The group.
        name: Name of the format that it becomes.
        form: Format of all groups, where this one has none of its own.
        products: What the products of the model share.

    Raises:
        CheckpointError: It is not served.
    """
    form = group.get("format", str, form)
    if form not in SERVED:
        why = OTHERS.get(form, f"must be one of {', '.join(SERVED)}")
        raise CheckpointError(f"{group.path}: 'quantization_config' has the format {shown(form)}, not served: {why}")
    if "output_activations" in group:
        raise group.refuse("output_activations", "must be null: outputs are not quantized")
    if "weights" not in group:
        raise CheckpointError(f"{group.path}: {name} quantizes activations alone: use a checkpoint with 'weights'")
    scheme = _read_weights(group.section("weights"), form)
    weights = SchemeFormat(name, scheme, products)
    if "input_activations" not in group:
        return weights
    return _rounded(weights, group.section("input_activations"))


def _read_weights(args: Fields, form: str) -> WeightScheme:
    kind, bits = args.get("type", str, "int").lower(), args.get("num_bits", int, 8)
    if kind not in SERVED[form]:
        raise args.refuse("type", f"{form} has {' or '.join(SERVED[form])}")
    packed = form == "pack-quantized"
    served = (8,) if kind == "float" else (4, 8) if packed else range(2, 9)
    if bits not in served:
        raise args.refuse(
            "num_bits", f"{form} of type {kind} is served with 4 or 8 bits as W4A16, and 8 as W8A16 or FP8"
        )
    if args.values.get("dynamic"):
        raise args.refuse("dynamic", "weights must have scales that are stored")
    symmetric, layout = args.flag("symmetric", True), _read_layout(args)
    if not symmetric and (kind == "float" or (packed and layout.rows != 1)):
        raise args.refuse("symmetric", "zero points are served for integers with scales by group or channel")
    return WeightScheme(bits, packed, kind == "float", symmetric, layout)


def _read_layout(args: Fields) -> ScaleLayout:
    size = args.get("group_size", int, 0)
    silent = "group" if size > 0 else "channel" if size == -1 else "tensor"
    strategy = args.get("strategy", str, silent).lower()
    order = args.values.get("actorder")
    by_input = order is True or (isinstance(order, str) and order.lower() in ("group", "dynamic"))
    if by_input and strategy != "group":
        raise args.refuse("actorder", f"the strategy {shown(strategy)} has no groups")
    if strategy == "group":
        return ScaleLayout(1, args.positive("group_size"), not by_input)
    if strategy == "block":
        return ScaleLayout(*read_block(args, "block_structure"))
    if strategy not in ("tensor", "channel"):
        raise args.refuse("strategy", "must be tensor, channel, group or block")
    return ScaleLayout() if strategy == "tensor" else ScaleLayout(1)


def read_block(args: Fields, key: str) -> tuple[int, int]:
    """Returns the outputs and inputs of a block: [128, 128] or "128x128". Raises CheckpointError."""
    value = args.values.get(key)
    sides = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(side) for side in sides)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise args.refuse(key, "must be outputs and inputs of a block, as [128, 128]") from None
    # Weights are dequantized by multiples of ROWS outputs, which must not cut a block.
    if rows < 1 or ROWS % rows or not 1 <= columns <= 2**16:
        raise args.refuse(key, f"blocks may have a divisor of {ROWS} as outputs, and up to 65536 inputs")
    return rows, columns


def _rounded(weights: WeightFormat, args: Fields) -> WeightFormat:
    """Returns the format with rounded activations. Raises CheckpointError for others than 8 bits, symmetric."""
    kind = args.get("type", str, "int").lower()
    if args.get("num_bits", int, 8) != 8 or kind not in ("int", "float"):
        raise args.refuse("num_bits", "activations are served in 8 bits of type int or float, or not quantized (A16)")
    if not args.flag("symmetric", True):
        raise args.refuse("symmetric", "activations must be symmetric; use the model in W8A16 or W8A8 symmetric")
    dynamic, strategy = args.values.get("dynamic", False), args.get("strategy", str, "tensor").lower()
    if not isinstance(dynamic, bool):
        raise args.refuse("dynamic", "activations must be true or false; use the model in FP8 or W8A8")
    floating = kind == "float"
    if not dynamic:
        if strategy != "tensor":
            raise args.refuse("strategy", "scales that are stored must be of a tensor")
        return RoundedFormat(weights, RowRounding(floating), "input_scale")
    if strategy == "group":
        return RoundedFormat(weights, RowRounding(floating, args.positive("group_size")))
    if strategy not in ("token", "tensor"):
        raise args.refuse("strategy", "must be token, tensor or group")
    # A scale of a whole batch would make a row's bits depend on other rows. So tensor is computed as token, the finer.
    return RoundedFormat(weights, RowRounding(floating))
