"""Functions of vectors, with the precision of float32, the same on every CPU."""

import math

from model.kernels.code import Code
from model.kernels.values import FLOATS, Value

LOG2E = math.log2(math.e)
LEAST = -126.0  # 2 to what is below is 0


def exp2(code: Code, x: Value) -> Value:
    """2^x for x up to 127; exactly 1 for 0, and 0 below LEAST. Taylor's series around the next whole number."""
    held = code.maximum(x, LEAST - 1)
    whole = code.rounded(held)
    part = held - whole
    series = code.floats(math.log(2) ** 7 / math.factorial(7))
    for power in range(6, -1, -1):
        series = code.fma(series, part, code.floats(math.log(2) ** power / math.factorial(power)))
    exponent = code.to_int(whole)
    scale = code.cast((exponent + 127) << 23, FLOATS)
    return series * scale


def exp(code: Code, x: Value) -> Value:
    """For x up to 88."""
    return exp2(code, x * LOG2E)


def sigmoid(code: Code, x: Value) -> Value:
    return 1.0 / (exp(code, code.minimum(-1.0 * x, 88.0)) + 1.0)


def tanh(code: Code, x: Value) -> Value:
    return sigmoid(code, x * 2.0) * 2.0 - 1.0


def erf(code: Code, x: Value) -> Value:
    """Within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = code.absolute(x)
    t = 1.0 / code.fma(size, code.floats(0.3275911), code.floats(1.0))
    series = code.floats(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = code.fma(series, t, code.floats(factor))
    y = 1.0 - series * t * exp(code, code.maximum(-1.0 * size * size, -87.0))
    return code.select(x < 0.0, -1.0 * y, y)


def silu(code: Code, x: Value) -> Value:
    return x * sigmoid(code, x)


def gelu(code: Code, x: Value) -> Value:
    return x * 0.5 * (erf(code, x * math.sqrt(0.5)) + 1.0)


def gelu_tanh(code: Code, x: Value) -> Value:
    """x sigmoid(2 u) is x (1 + tanh u) / 2."""
    cubic = code.fma(x * x * x, code.floats(0.044715), x)
    return x * sigmoid(code, cubic * (2.0 * math.sqrt(2.0 / math.pi)))


def quick_gelu(code: Code, x: Value) -> Value:
    return x * sigmoid(code, x * 1.702)


def relu(code: Code, x: Value) -> Value:
    return code.maximum(x, 0.0)
