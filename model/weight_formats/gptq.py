"""GPTQ checkpoints (Frantar et al., 2022), as AutoGPTQ and GPTQModel write them.

A linear is stored in

- `qweight` [in * bits / 32, out] int32: the integers of consecutive inputs, the first in the lowest bits;
- `qzeros` [groups, out * bits / 32] int32: the zero points of consecutive outputs;
- `scales` [groups, out], floating point;
- `g_idx` [in] int32: the group of each input. With 'desc_act' groups are not runs of inputs; else it may be missing.

Until late in 2023 AutoGPTQ wrote a `bias` for every linear, of zeros where the model has none.

The layout is that of `pack` and `dequantize_weight` in GPTQModel's gptqmodel/nn_modules/qlinear, zero points that of
`convert_gptq_v1_to_v2_format_module` in its gptqmodel/utils/model.py.
"""

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.fields import Fields
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.groups import GroupProducts, GroupWeights
from model.weight_formats.modules import in_layer, is_within, read_names, read_rules, rule_of
from model.weight_formats.patterns import NamePattern
from model.weight_formats.plain import PLAIN
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight
from model.weight_formats.words import Packing, read_group_size, unpack_words

OUTPUT_LAYERS = ("lm_head", "embed_out")
OVERRIDES = ("bits", "group_size", "sym", "desc_act")  # options of 'dynamic' that change how a linear is stored
ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in each integer of a word

INSTEAD = "use a checkpoint with 'checkpoint_format' gptq or gptq_v2, or plain weights with --quantization int8"


def read_zeros(words: Tensor, bits: int, less_one: bool) -> Tensor:
    """Unpacks zero points.

    'gptq' stores them less 1, and writers subtract from whole words: a zero point of 0 borrows from the next one. So
    the 1 is added to whole words, with its carry. In 'gptq_v2' they are as they are.

    Args:
        words: [groups, out * bits / 32] int32.
        bits: 4 or 8.
        less_one: Whether they are stored less 1.

    Returns:
        [groups, out] uint8.
    """
    return unpack_words(words + ONES[bits] if less_one else words, bits)


class GptqFormat:
    """`WeightFormat` of `quant_method` gptq. Linears outside of the numbered layers are plain, but for 'lm_head'."""

    name = "gptq"

    def __init__(self, options: Fields, products: GroupProducts | None = None) -> None:
        """Reads the options of config.json.

        Args:
            options: 'quantization_config'.
            products: What the products of the model share. None for the model's own format.

        Raises:
            CheckpointError: The format is not served with these options.
        """
        self._products = GroupProducts() if products is None else products
        self._less_one = _is_less_one(options)
        middle = "'sym' is true" if options.flag("sym") else ""
        self._packing = Packing(options.path, _bits(options), read_group_size(options), middle)
        # An index is right for any order. So it is kept where config.json does not say that the groups are runs.
        self._ordered = options.flag("desc_act", True) and self._packing.group is not None
        self._modules = read_names(options, "modules_in_block_to_quantize")
        self._head = options.flag("lm_head")
        self._rules = read_rules(options)
        self._chosen_by = self._formats_of_rules(options)
        self.blocks = self._blocks()

    def _formats_of_rules(self, options: Fields) -> dict[NamePattern, WeightFormat]:
        """Returns the format of the linears that each rule of 'dynamic' is for."""
        made: list[tuple[dict[str, Any], WeightFormat]] = [({}, self)]
        chosen: dict[NamePattern, WeightFormat] = {}
        for rule in self._rules:
            if rule.overrides is None:
                chosen[rule.pattern] = PLAIN
                continue
            given = {key: rule.overrides[key] for key in OVERRIDES if rule.overrides.get(key) is not None}
            changes = {key: value for key, value in given.items() if options.values.get(key) != value}
            known = next((other for known, other in made if known == changes), None)
            if known is None:
                known = GptqFormat(options.having({**changes, "dynamic": None}), self._products)
                made.append((changes, known))
            chosen[rule.pattern] = known
        return chosen

    def _blocks(self) -> Blocks:
        inner = 1 if self._ordered or self._packing.group is None else self._packing.group
        others = [other.blocks for other in self._chosen_by.values() if other is not self]
        every = [Blocks(self._packing.word, lcm(self._packing.word, inner)), *others]
        return Blocks(lcm(*(one.rows for one in every)), lcm(*(one.columns for one in every)))

    def for_linear(self, name: str) -> WeightFormat:
        if in_layer(name):
            stored = not self._modules or any(is_within(name, module) for module in self._modules)
        else:
            stored = self._head and name.rpartition(".")[2] in OUTPUT_LAYERS
        rule = rule_of(self._rules, name)
        if not stored or rule is None:
            return self if stored else PLAIN
        return self._chosen_by[rule.pattern]

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        packing = self._packing
        packing.check(out, "outputs")
        packing.check(width, "inputs")
        words = (width // packing.word, out)
        return (
            StoredTensor("qweight", words, torch.int32, rows=Axis(1), columns=Axis(0, packing.word)),
            *packing.of_groups(out, width, divided=not self._ordered),
            StoredTensor("g_idx", (width,), torch.int32, columns=Axis(0), optional=not self._ordered),
            StoredTensor("bias", (out,), rows=Axis(0), optional=True),
        )

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        return ()

    def groups(self, weight: StoredWeight) -> GroupWeights:
        """Unpacks a linear, see `GroupFormat.groups`."""
        packing = self._packing
        index = self._index(weight)
        zeros = read_zeros(weight["qzeros"], packing.bits, self._less_one)
        scales, offsets = packing.scales_and_offsets(weight, zeros)
        values = unpack_words(weight["qweight"].T, packing.bits)
        return GroupWeights(packing.levels, values, scales, offsets, packing.group or weight.inputs, index)

    def _index(self, weight: StoredWeight) -> Tensor | None:
        """Returns the group of each input. None where groups are runs.

        Raises CheckpointError for a group that does not exist, and for an order that config.json denies.
        """
        if "g_idx" not in weight.tensors:
            return None
        index, groups = weight["g_idx"].to(torch.int64), _groups(weight)
        if index.is_meta:
            return index if self._ordered else None
        wrong = (index < 0) | (index >= groups)
        if wrong.any():
            raise CheckpointError(
                f"{weight.name}.g_idx holds the group {int(index[wrong][0])}, must be in [0, {groups - 1}]"
            )
        if self._ordered:
            return index
        # Zeros stand for runs too: ExLlama takes them so, and writers without act-order have left them.
        runs = torch.arange(weight.inputs, device=index.device) // (self._packing.group or weight.inputs)
        if index.any() and not torch.equal(index - index[0], runs):
            raise CheckpointError(
                f"{weight.name}.g_idx orders inputs by activation; 'desc_act' is false in {self._packing.path}: if the "
                "weights are right, set it to true"
            )
        return None

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._products.product(self, weights, bias, dtype, device)


def _groups(weight: StoredWeight) -> int:
    """Returns the groups of the whole linear, of which this may be a part."""
    return next(one.shape[0] for one in weight.described if one.key == "scales")


def _bits(options: Fields) -> int:
    bits = options.get("bits", int)
    if bits not in Packing.LEVELS:
        raise options.refuse("bits", "which is not served for GPTQ; 4 and 8 are")
    return bits


def _is_less_one(options: Fields) -> bool:
    """Returns whether zero points are stored less 1. Raises CheckpointError for a layout that is not served."""
    key = "checkpoint_format" if "checkpoint_format" in options else "format"
    layout = options.get(key, str, "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise options.refuse(key, f"which is not served; {INSTEAD}")
    if options.flag("is_marlin_format"):
        raise options.refuse("is_marlin_format", f"which is not served; {INSTEAD}")
    if options.get("pack_dtype", str, "int32") != "int32":
        raise options.refuse("pack_dtype", "which is not served; int32 is")
    return layout == "gptq"
