"""Schemes of compressed-tensors that are tested, one of each kind."""

from dataclasses import replace

from tests.model.weight_formats.compressed import Recipe

W4 = Recipe("w4-groups", size=32)
W4_ZEROS = Recipe("w4-zeros", symmetric=False, size=32)
W4_CHANNEL = Recipe("w4-channel-zeros", strategy="channel", symmetric=False)
W4_ORDER = Recipe("w4-actorder", size=32, actorder="group")
W4_ZEROS_ORDER = Recipe("w4-zeros-actorder", symmetric=False, size=16, actorder="group")
W8 = Recipe("w8-groups-zeros", bits=8, symmetric=False, size=8, actorder="weight")
W8_32 = Recipe("w8-groups", bits=8, size=32)
W8_CHANNEL = Recipe("w8-channel", bits=8, strategy="channel")
INT8 = Recipe("int-channel", "int-quantized", bits=8, strategy="channel")
INT8_ZEROS = Recipe("int-groups-zeros", "naive-quantized", bits=8, symmetric=False, size=16)
INT8_TENSOR = Recipe("int-tensor", "naive-quantized", bits=8, strategy="tensor")
FP8_TENSOR = Recipe("fp8-tensor", "float-quantized", "float", 8, "tensor")
FP8_CHANNEL = Recipe("fp8-channel", "float-quantized", "float", 8, "channel")
FP8_BLOCK = Recipe("fp8-block", "float-quantized", "float", 8, "block", block=(16, 16))
NAIVE_FP8 = Recipe("naive-fp8", "naive-quantized", "float", 8, "channel")

ATTENTION = replace(FP8_CHANNEL, targets=(r"re:.*self_attn\.(q|k|v|o)_proj$",), own_form=True)
OTHERS = replace(W4_ZEROS, own_form=True)

RECIPES = (
    W4, W4_ZEROS, W4_CHANNEL, W4_ORDER, W4_ZEROS_ORDER, W8, W8_CHANNEL, INT8, INT8_ZEROS, INT8_TENSOR, FP8_TENSOR,
    FP8_CHANNEL, FP8_BLOCK, NAIVE_FP8,
)  # fmt: skip
