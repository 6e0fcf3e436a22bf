"""Elements of the KV pool, and the rule for 8 bits that all back ends follow.

8-bit elements are int8, or float8 e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022). Each token and head
has one float32 scale, K and V apart: largest magnitude / largest value of the format.

Invariant: a scale is set when its token is written, and an earlier token is never scaled anew. So pages can be shared
as they are.
"""

import torch
from torch import Tensor

EIGHT_BIT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ALL_ONES = 255  # bytes of it are NaN in float32, bfloat16, float16 and float8
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def to_eight_bit(rows: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantises rows.

    Args:
        rows: [..., head_dim].
        kind: Dtype of the elements.

    Returns:
        [..., head_dim] uint8, the elements as bytes, and [..., 1] float32, the scales.
    """
    rows = rows.float()
    # By a tensor: on a GPU torch divides by a number as it multiplies by its inverse, which rounds otherwise.
    size = rows.abs().amax(-1, keepdim=True)
    scale = size.div_(torch.full_like(size, LARGEST[kind]))
    scale.masked_fill_(scale == 0, 1.0)
    scaled = rows / scale
    if kind is torch.int8:
        scaled = scaled.round_()
    return scaled.clamp_(-LARGEST[kind], LARGEST[kind]).to(kind).view(torch.uint8), scale
