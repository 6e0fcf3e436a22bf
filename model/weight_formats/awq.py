"""AWQ checkpoints (Lin et al., 2023) in the layout "gemm", as AutoAWQ writes them.

A linear is stored in `qweight` [in, out / 8], `qzeros` [groups, out / 8], both int32, and `scales` [groups, out]. A
word has 8 outputs; `ORDER` says which of them stands where. The layout is that of `WQLinear_GEMM.from_linear` in
AutoAWQ's awq/modules/linear/gemm.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.fields import Fields
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.groups import GroupProducts, GroupWeights
from model.weight_formats.modules import in_layer, is_within, read_names, read_rules, rule_of
from model.weight_formats.plain import PLAIN
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight
from model.weight_formats.words import Packing, read_group_size, unpack_words

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each 4 bits of a word, from the lowest
INSTEAD = "use a checkpoint of version gemm, or plain weights with --quantization int8"


def unpack_outputs(words: Tensor) -> Tensor:
    """Unpacks integers of consecutive outputs, [rows, out / 8] int32. Returns [rows, out] uint8."""
    places = sorted(range(len(ORDER)), key=ORDER.__getitem__)
    return unpack_words(words, BITS).unflatten(1, (-1, len(ORDER)))[..., places].flatten(1)


class AwqFormat:
    """`WeightFormat` of `quant_method` awq. Linears outside of the numbered layers are plain."""

    name = "awq"

    def __init__(self, options: Fields) -> None:
        """Reads the options of config.json.

        Args:
            options: 'quantization_config'.

        Raises:
            CheckpointError: The format is not served with these options.
        """
        options = _renamed(options)
        _check(options)
        middle = "" if options.flag("zero_point", True) else "'zero_point' is false"
        self._packing = Packing(options.path, BITS, read_group_size(options), middle)
        self._plain = read_names(options, "modules_to_not_convert")
        self._rules = read_rules(options)
        if any(rule.overrides for rule in self._rules):
            raise options.refuse("dynamic", 'of which only rules with "-:" are served for AWQ')
        self._products = GroupProducts()
        self.blocks = Blocks(self._packing.word, self._packing.group or 1)

    def for_linear(self, name: str) -> WeightFormat:
        rule = rule_of(self._rules, name)
        if not in_layer(name) or (rule is not None and rule.overrides is None):
            return PLAIN
        return PLAIN if any(is_within(name, part) for part in self._plain) else self

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        packing = self._packing
        packing.check(out, "outputs")
        words = (width, out // packing.word)
        return (
            StoredTensor("qweight", words, torch.int32, rows=Axis(1, packing.word), columns=Axis(0)),
            *packing.of_groups(out, width, divided=True),
        )

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        return ()

    def groups(self, weight: StoredWeight) -> GroupWeights:
        """Unpacks a linear, see `GroupFormat.groups`."""
        packing = self._packing
        scales, offsets = packing.scales_and_offsets(weight, unpack_outputs(weight["qzeros"]))
        values = unpack_outputs(weight["qweight"]).T.contiguous()
        return GroupWeights(packing.levels, values, scales, offsets, packing.group or weight.inputs)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._products.product(self, weights, bias, dtype, device)


def _renamed(options: Fields) -> Fields:
    """Returns the options by transformers' names; AutoAWQ's own file has others."""
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    return options.having({to: options.values[name] for name, to in names.items() if name in options})


def _check(options: Fields) -> None:
    """Raises CheckpointError for bits and a layout that are not served."""
    if options.get("bits", int) != BITS:
        raise options.refuse("bits", "which is not served for AWQ; 4 is")
    backend = options.get("backend", str, "").lower()
    if backend == "llm-awq":
        raise options.refuse("backend", f"whose layout is not served; {INSTEAD}")
    key = next((key for key in ("version", "checkpoint_format", "format") if key in options), "version")
    if options.get(key, str, "gemm").lower() != "gemm":
        raise options.refuse(key, f"which is not served; {INSTEAD}")
    if options.get("pack_dtype", str, "int32") != "int32":
        raise options.refuse("pack_dtype", "which is not served; int32 is")
