"""A plain statement, in numpy, of activations in 8 bits. It shares no code with the formats."""

import numpy as np

from bench.quantized.numbers import E4M3, encode_e4m3


def round_rows(x: np.ndarray, kind: str, size: int | None = None, scale: float | None = None) -> np.ndarray:
    """x: float32 [rows, in]. Rounds to int8 or e4m3 and back; size: inputs that share a scale, None for a row."""
    made = np.empty_like(x)
    step = size or x.shape[1]
    for start in range(0, x.shape[1], step):
        part = x[:, start : start + step]
        most = np.float32(448 if kind == "float" else 127)
        if scale is None:
            scales = np.abs(part).max(axis=1, keepdims=True) / most
            scales[scales == 0] = 1
        else:
            scales = np.full((len(x), 1), scale, dtype=np.float32)
        if kind == "float":
            rounded = E4M3[encode_e4m3(part / scales)].astype(np.float32)
        else:
            rounded = np.rint(part / scales).clip(-128, 127)
        made[:, start : start + step] = rounded * scales
    return made
