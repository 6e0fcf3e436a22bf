"""Controls of draws as kernels read them: a row of numbers for each draw, so that one transfer brings all."""

import numpy as np
import triton.language as tl

from model.sampling.sampler import Draws, Ints

# Columns, int64 each.
ROW = tl.constexpr(0)  # row of the logits
PLACE = tl.constexpr(1)  # index in the result
KEY = tl.constexpr(2)  # key of the noise
TEMPERATURE = tl.constexpr(3)  # bits of a float64
LEAST = tl.constexpr(4)  # log of min_p, bits of a float64
TOP_K = tl.constexpr(5)  # 0 without one
TOP_P = tl.constexpr(6)  # bits of a float64
COLUMNS = tl.constexpr(7)  # their number


def columns_of(draws: Draws, places: Ints, vocabulary: int) -> Ints:
    """Returns the controls, [draws, COLUMNS] int64.

    Args:
        draws: The draws.
        places: [draws] int64. Where the result has the token of each.
        vocabulary: Logits of a row. A top_k that is not below it is left out.
    """
    made = np.empty((len(draws.rows), COLUMNS.value), np.int64)
    made[:, ROW.value], made[:, PLACE.value], made[:, KEY.value] = draws.rows, places, draws.keys
    made[:, TOP_K.value] = np.where(draws.top_k < vocabulary, draws.top_k, 0)
    floats = made.view(np.float64)
    floats[:, TEMPERATURE.value], floats[:, TOP_P.value] = draws.temperature, draws.top_p
    with np.errstate(divide="ignore"):
        np.log(draws.min_p, out=floats[:, LEAST.value])
    return made
