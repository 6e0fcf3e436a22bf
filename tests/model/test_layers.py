"""Law: a row has the same bits whatever rows stand beside it. And the layers compute what they say."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from model.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, gated, gelu, gelu_tanh, rms_norm, silu, soft_capped
from model.rope import Rope, frequencies, rotate

pytestmark = pytest.mark.sample(3)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS = 300
COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 299]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def check_rows(function: Callable[[Tensor], Tensor], x: Tensor, counts: list[int] = COUNTS) -> None:
    """Windows of rows at the front, at the back and off by one (so that memory is aligned otherwise)."""
    whole = function(x)
    for count in counts:
        for start in {0, 1, len(x) - count}:
            part = function(x[start : start + count])
            assert torch.equal(part, whole[start : start + count]), (count, start)
    scattered = torch.from_numpy(np.random.default_rng(1).permutation(len(x)))
    assert torch.equal(function(x[scattered]), whole[scattered])


WIDTHS = [(64, 128), (96, 64), (100, 64), (33, 17), (1, 1), (7, 331), (576, 1536), (1536, 576), (256, 2048)]


@each_dtype
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_of_linear(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    inputs, outputs = widths
    weight = random(outputs, inputs, dtype=dtype)
    bias = random(outputs, dtype=dtype, seed=1) if inputs % 2 else None
    counts = COUNTS if inputs * outputs < 100_000 else [1, 2, 3, 4, 5, 16, 17, 64, 129, 299]
    check_rows(Linear(weight, bias), random(ROWS, inputs, dtype=dtype, seed=2), counts)


@pytest.mark.usefixtures("two_threads")
@each_dtype
@pytest.mark.parametrize("widths", [(100, 64), (576, 1536), (256, 2048)], ids=str)
def test_rows_of_linear_with_two_threads(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    weight = random(widths[1], widths[0], dtype=dtype)
    check_rows(Linear(weight), random(ROWS, widths[0], dtype=dtype, seed=2), [1, 2, 5, 16, 129])


ODD = [1, 2, 3, 7, 16, 33, 64, 100, 255, 704, 1001, 4096]


@each_dtype
@pytest.mark.parametrize("width", ODD)
def test_rows_of_rms_norm(dtype: torch.dtype, width: int) -> None:
    weight = random(width, dtype=dtype)
    check_rows(lambda x: rms_norm(x, weight, 1e-5), random(ROWS, width, dtype=dtype, seed=1))


@each_dtype
@pytest.mark.parametrize("width", ODD)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.sample(3)
def test_rows_of_gated(dtype: torch.dtype, width: int, activation: str) -> None:
    check_rows(lambda x: gated(x, ACTIVATIONS[activation]), random(ROWS, 2 * width, dtype=dtype) * 4)


@each_dtype
@pytest.mark.parametrize("width", ODD)
def test_rows_of_layer_norm(dtype: torch.dtype, width: int) -> None:
    norm = LayerNorm(random(width, dtype=dtype), random(width, dtype=dtype, seed=2), 1e-5)
    check_rows(norm, random(ROWS, width, dtype=dtype, seed=1))


@each_dtype
def test_rows_of_soft_capped(dtype: torch.dtype) -> None:
    check_rows(lambda x: soft_capped(x, 5.0), random(ROWS, 331, dtype=dtype) * 9)


@each_dtype
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 6), (4, 24), (8, 64), (5, 128)])
def test_rows_of_rotate(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    rope = Rope(frequencies(head_dim, 10000.0), ROWS, dtype, torch.device("cpu"))
    x = random(ROWS, heads, head_dim, dtype=dtype)
    positions = torch.arange(ROWS)
    whole = rotate(x, *rope.at(positions[None]))
    for count in COUNTS:
        for start in {0, 1, ROWS - count}:
            rows = slice(start, start + count)
            assert torch.equal(rotate(x[rows], *rope.at(positions[None, rows])), whole[rows])


def test_the_check_of_rows_sees_a_leak() -> None:
    """Planted fault: results that depend on how many rows there are."""
    with pytest.raises(AssertionError):
        check_rows(lambda x: x * (1 + 1e-6 * len(x)), random(ROWS, 8, dtype=torch.float32))


def close(found: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found.double().numpy(), expected, atol=TOLERANCE[dtype] * scale, rtol=0)


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 50])
def test_values_of_linear(dtype: torch.dtype, bias: bool, rows: int) -> None:
    weight, x = random(33, 100, dtype=dtype), random(rows, 100, dtype=dtype, seed=1)
    b = random(33, dtype=dtype, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    close(Linear(weight, b)(x), expected.numpy(), dtype)


@each_dtype
def test_linear_takes_any_strides(dtype: torch.dtype) -> None:
    weight, x = random(20, 10, dtype=dtype), random(10, 6, dtype=dtype, seed=1)
    assert torch.equal(Linear(weight)(x.T), Linear(weight)(x.T.contiguous()))
    assert torch.equal(Linear(weight.T.contiguous().T)(x.T), Linear(weight)(x.T))


@each_dtype
def test_values_of_rms_norm(dtype: torch.dtype) -> None:
    x, weight = random(9, 100, dtype=dtype) * 5, random(100, dtype=dtype, seed=1)
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.01) * weight.double().numpy()
    close(rms_norm(x, weight, 0.01), expected, dtype)


@each_dtype
def test_values_of_gated(dtype: torch.dtype) -> None:
    x = random(9, 200, dtype=dtype) * 5
    gate, up = np.split(x.double().numpy(), 2, -1)
    close(gated(x, silu), gate / (1 + np.exp(-gate)) * up, dtype)


def test_silu_of_large_values() -> None:
    """exp overflows to infinity for them; silu does not."""
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    assert gated(gate_up, silu).tolist() == [[0.0, 1e4, 0.0, 0.0]]


@cache
def turned(head_dim: int, theta: float, positions: int) -> np.ndarray:
    """[positions, head_dim / 2] complex factor of each pair."""
    pairs = np.arange(head_dim // 2)
    return np.exp(1j * np.arange(positions)[:, None] * theta ** (-2 * pairs / head_dim))


@each_dtype
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_values_of_rotate(dtype: torch.dtype, theta: float) -> None:
    """Element i of the low half and element i of the high half are one complex number that turns."""
    rope = Rope(frequencies(24, theta), 200, dtype, torch.device("cpu"))
    positions = torch.tensor([0, 1, 7, 199])
    x = random(4, 3, 24, dtype=dtype)
    low, high = np.split(x.double().numpy(), 2, -1)
    product = (low + 1j * high) * turned(24, theta, 200)[positions.numpy()][:, None]
    found = rotate(x, *rope.at(positions[None]))
    close(found, np.concatenate((product.real, product.imag), -1), dtype)
    assert torch.equal(found[0], x[0]), "position 0 is not turned"


def test_values_of_activations() -> None:
    x = torch.linspace(-9, 9, 1001)
    erf = torch.nn.functional.gelu(x.double())
    tanh = torch.nn.functional.gelu(x.double(), approximate="tanh")
    close(gelu(x), erf.numpy(), torch.float32)
    close(gelu_tanh(x), tanh.numpy(), torch.float32)
    assert gelu_tanh(torch.tensor([-1e4, 1e4])).tolist() == [0.0, 1e4]


@each_dtype
def test_values_of_layer_norm(dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(9, 100, dtype=dtype) * 5,
        random(100, dtype=dtype, seed=1),
        random(100, dtype=dtype, seed=2),
    )
    wide = x.double().numpy()
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 0.01)
    close(LayerNorm(weight, bias, 0.01)(x), normal * weight.double().numpy() + bias.double().numpy(), dtype)


@each_dtype
def test_weights_of_a_norm_that_are_wider_than_what_it_normalises(dtype: torch.dtype) -> None:
    """Gemma's 1 + w would lose most of w in 16 bits."""
    x, weight = random(9, 100, dtype=dtype), 1 + random(100, dtype=torch.float32, seed=1) / 1000
    found = RMSNorm(weight, 1e-6)(x)
    assert found.dtype == dtype
    assert torch.equal(found, rms_norm(x.float(), weight, 1e-6).to(dtype))


def test_rotation_of_a_part_of_each_head() -> None:
    rope = Rope(frequencies(8, 10000.0), 20, torch.float32, torch.device("cpu"))
    x = random(5, 3, 24, dtype=torch.float32)
    turn = rope.at(torch.arange(5)[None] + 7)
    assert torch.equal(rotate(x, *turn)[..., :8], rotate(x[..., :8].contiguous(), *turn))
    assert torch.equal(rotate(x, *turn)[..., 8:], x[..., 8:])
