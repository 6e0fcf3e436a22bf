"""Functions of vectors, with the precision of float32, the same on every CPU."""

import math

from model.cpu.kernels.code import Code
from model.cpu.kernels.values import FLOATS, INTS, Value

LOG2E = math.log2(math.e)
LEAST = -126.0  # 2^x of a smaller x is 0


def exp2(code: Code, x: Value) -> Value:
    """Returns 2^x for x up to 127, by Taylor's series around the next whole number.

    Exactly 1 for 0, 0 where the result is below normal numbers, NaN for NaN.
    """
    held = code.maximum(x, LEAST - 1)
    whole = code.rounded(held)
    part = held - whole
    series = code.floats(math.log(2) ** 7 / math.factorial(7))
    for power in range(6, -1, -1):
        series = code.fma(series, part, code.floats(math.log(2) ** power / math.factorial(power)))
    exponent = code.to_int(whole)
    scale = code.cast((exponent + 127) << 23, FLOATS)
    return code.select(x >= x, series * scale, x)


def exp(code: Code, x: Value) -> Value:
    """Returns e^x for x up to 88."""
    return exp2(code, x * LOG2E)


def log(code: Code, x: Value) -> Value:
    """Returns the logarithm of normal numbers above 0, by the series of Cephes' logf around 1."""
    bits = code.cast(x, INTS)
    half = (bits & 0x7FFFFF) | 0x3F000000  # in [0.5, 1)
    part, exponent = code.cast(half, FLOATS), code.to_float((bits >> 23) - 126)
    small = part < math.sqrt(0.5)
    part = code.select(small, part + part, part) - 1.0
    exponent = code.select(small, exponent - 1.0, exponent)
    series = code.floats(7.0376836292e-2)
    for factor in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
        -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        series = code.fma(series, part, code.floats(factor))
    square = part * part
    low = code.fma(exponent, code.floats(-2.12194440e-4), series * part * square)
    return code.fma(exponent, code.floats(0.693359375), part + code.fma(square, code.floats(-0.5), low))


def sigmoid(code: Code, x: Value) -> Value:
    made = 1.0 / (exp(code, code.minimum(-1.0 * x, 88.0)) + 1.0)
    made = code.select(x < -88.0, x * 0.0, made)
    return code.select(x >= x, made, x)  # a minimum leaves NaN out


def tanh(code: Code, x: Value) -> Value:
    return sigmoid(code, x * 2.0) * 2.0 - 1.0


def erf(code: Code, x: Value) -> Value:
    """Returns the error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = code.absolute(x)
    t = 1.0 / code.fma(size, code.floats(0.3275911), code.floats(1.0))
    series = code.floats(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = code.fma(series, t, code.floats(factor))
    y = 1.0 - series * t * exp(code, code.maximum(-1.0 * size * size, -87.0))
    return code.select(x < 0.0, -1.0 * y, y)


def softplus(code: Code, x: Value) -> Value:
    """Returns log(1 + e^x)."""
    made = code.maximum(x, 0.0) + log(code, exp(code, -1.0 * code.absolute(x)) + 1.0)
    return code.select(x >= x, made, x)  # a maximum leaves NaN out


def silu(code: Code, x: Value) -> Value:
    return x * sigmoid(code, x)


def gelu(code: Code, x: Value) -> Value:
    return x * 0.5 * (erf(code, x * math.sqrt(0.5)) + 1.0)


def gelu_tanh(code: Code, x: Value) -> Value:
    """Returns GELU's tanh approximation: x sigmoid(2 u) is x (1 + tanh u) / 2."""
    cubic = code.fma(x * x * x, code.floats(0.044715), x)
    return x * sigmoid(code, cubic * (2.0 * math.sqrt(2.0 / math.pi)))


def quick_gelu(code: Code, x: Value) -> Value:
    return x * sigmoid(code, x * 1.702)


def relu(code: Code, x: Value) -> Value:
    return code.select(x < 0.0, code.like(x, 0.0), x)


def relu2(code: Code, x: Value) -> Value:
    made = relu(code, x)
    return made * made
