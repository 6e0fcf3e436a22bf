"""FP8 as DeepSeek and Qwen ship it, in blocks, and as AutoFP8 and transformers do, with one scale for a tensor.

Layout: transformers' integrations/finegrained_fp8.py and vLLM's quantization/fp8.py. Weights are float8 e4m3, scales
are multiplied (`weight_scale_inv` too). Output layers are plain in these checkpoints, with or without a list.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.fields import Fields
from model.weight_formats.activations import RoundedFormat, RowRounding
from model.weight_formats.compressed_tensors_scheme import read_block
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.groups import GroupProducts, GroupWeights
from model.weight_formats.levels import E4M3
from model.weight_formats.modules import in_layer
from model.weight_formats.names import ModuleList
from model.weight_formats.plain import COLUMNS, PLAIN, ROWS
from model.weight_formats.scales import ScaleLayout, finite_scales, float8_values
from model.weight_formats.stored import StoredTensor, StoredWeight


class Float8Weights:
    """`GroupFormat` of e4m3 weights with a scale for each block, or one."""

    name = "fp8"

    def __init__(self, scales: ScaleLayout, key: str) -> None:
        self._scales, self._key, self._products = scales, key, GroupProducts()
        self.blocks = Blocks(scales.rows or 1, scales.columns or 1)

    def for_linear(self, name: str) -> WeightFormat:  # noqa: ARG002
        return self

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        weight = StoredTensor("weight", (out, width), torch.float8_e4m3fn, ROWS, COLUMNS)
        return weight, self._scales.described(self._key, out, width)

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        """Returns nothing: experts are saved one by one."""
        return ()

    def groups(self, weight: StoredWeight) -> GroupWeights:
        scales = self._scales.of_outputs(finite_scales(weight, self._key), weight.outputs)
        return GroupWeights(E4M3, float8_values(weight), scales, None, self._scales.columns or weight.inputs)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._products.product(self, weights, bias, dtype, device)


class Fp8:
    """`WeightFormat`."""

    name = "fp8"

    def __init__(self, options: Fields) -> None:
        """Reads 'quantization_config'. Raises CheckpointError for what is not served."""
        for key, served in (("fmt", ("e4m3", "float8_e4m3fn")), ("expert_dtype", ("fp8",))):
            if options.get(key, str, served[0]) not in served:
                raise options.refuse(key, f"must be {served[0]}; use the model in GPTQ, AWQ or compressed-tensors")
        if options.get("modules_to_convert", list, []):
            raise options.refuse("modules_to_convert", "must be empty: embeddings must be plain")
        self._plain = ModuleList(options, ("modules_to_not_convert", "ignored_layers"))
        self._linears = self._read(options)
        self.blocks = self._linears.blocks

    @staticmethod
    def _read(options: Fields) -> WeightFormat:
        """Returns the format of linears that are not plain."""
        # AutoFP8, which has scales of tensors alone, does not write the key; transformers writes null.
        theirs = "weight_block_size" in options.values
        blocks = ScaleLayout(*read_block(options, "weight_block_size")) if "weight_block_size" in options else None
        weights = Float8Weights(blocks or ScaleLayout(), "weight_scale_inv" if theirs else "weight_scale")
        scheme = options.get("activation_scheme", str, "dynamic").lower()
        if scheme not in ("dynamic", "static"):
            raise options.refuse("activation_scheme", "must be dynamic or static")
        if scheme == "dynamic":
            # Nothing is stored for activations, and they stay in 16 bits: more exact than vLLM, which rounds them to
            # float8 because its products on GPUs are of float8, and free of scales that ranks would have to share.
            return weights
        return RoundedFormat(weights, RowRounding(True), "activation_scale" if theirs else "input_scale")

    def for_linear(self, name: str) -> WeightFormat:
        if not in_layer(name) or name in self._plain:
            return PLAIN
        return self._linears

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        return self._linears.tensors(out, width)

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:
        return self._linears.stacked(out, width)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._linears.product(weights, bias, dtype, device)
