"""Parts of layers on kernels, beside torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from model.blocks import GatedMLP, PreNorm, SelfAttention
from model.decoder import Decoder, Embedding
from model.embedding_table import PlainTable
from model.gpu.parts import KernelGatedMLP, KernelNorm, KernelSelfAttention, with_kernels
from model.layers import RMSNorm, silu
from model.rope import Rope, frequencies, rotate
from tests.model.gpu.kernels.device import DEVICE
from tests.support.sectioned import in_turn

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of the largest magnitude. torch rounds more than once."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def check(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    allowed = TOLERANCE[found.dtype] * expected.float().abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), atol=allowed, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 80, 576])
def test_norm(dtype: torch.dtype, width: int) -> None:
    x, added = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=1)
    for weight in (random(width, dtype=dtype, seed=2), random(width, seed=2)):
        plain, kernel = RMSNorm(weight, 1e-3), KernelNorm(weight, 1e-3)
        check(kernel(x), plain(x))
        normal, summed = kernel.of_sum(x, added)
        check(summed, x + added)
        check(normal, plain(summed))


def test_norm_of_heads_that_lie_between_others() -> None:
    qkv = random(3, 7, 48)
    plain, kernel = RMSNorm(random(48, seed=1), 1e-6), KernelNorm(random(48, seed=1), 1e-6)
    check(kernel(qkv[:, 2:5]), plain(qkv[:, 2:5]))
    check(kernel(qkv.transpose(0, 1)), plain(qkv.transpose(0, 1)))
    check(kernel(qkv.transpose(1, 2)[:, :, :].transpose(1, 2)), plain(qkv))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pairs", [24, 8, 3])
def test_rotation(dtype: torch.dtype, pairs: int) -> None:
    """The first heads are rotated; all else stays."""
    rope = Rope(frequencies(2 * pairs, 100.0), 40, dtype, DEVICE)
    x, positions = random(4, 7, 48, dtype=dtype), torch.tensor([0, 39, 17, 3], device=DEVICE)
    expected = torch.cat((rotate(x[:, :5], *rope.at(positions[None])), x[:, 5:]), 1)
    KernelSelfAttention(0, 5, 1, 48, None, None, rope).rotate(  # type: ignore[arg-type]
        x[:, :5], type("Step", (), {"positions": positions[None]})()
    )
    check(x, expected)
    assert torch.equal(x[:, 5:], expected[:, 5:])
    assert torch.equal(x[..., 2 * pairs :], expected[..., 2 * pairs :])


class Kept:
    """Attention that keeps what it is given."""

    def write(self, _number: int, keys: Tensor, values: Tensor, _plan: object) -> None:
        self.keys, self.values = keys.clone(), values.clone()

    def attend(self, _number: int, queries: Tensor, _plan: object, _sinks: None = None) -> Tensor:
        return queries.clone()


@pytest.mark.parametrize("rotated_first", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dtype", "rotated"), [("float32", 48), ("float32", 20), ("bfloat16", 48)])
def test_norms_before_and_after_the_rotation(rotated_first: bool, normed: bool, dtype: str, rotated: int) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    rope, positions = Rope(frequencies(rotated, 100.0), 40, kind, DEVICE), torch.tensor([0, 39, 17, 3]).to(DEVICE)
    qkv, weights = random(4, 7 * 48, dtype=kind), (random(48, seed=1), random(48, seed=2))
    norms = tuple(RMSNorm(weight, 1e-3) for weight in weights) if normed else (None, None)

    def run(kind: type[SelfAttention]) -> tuple[Tensor, Kept]:
        kept = Kept()
        step: Any = type("Step", (), {"positions": positions[None], "attention": kept, "plan": None})()
        step.cos_sin = lambda one: one.at(positions[None])
        of: Any = (lambda *_: qkv.clone(), lambda x, _: x)
        normed = norms if kind is SelfAttention else tuple(one and KernelNorm(one.weight, one.eps) for one in norms)
        return kind(0, 5, 1, 48, *of, rope, *normed, rotated_first=rotated_first)(qkv, step), kept

    (found, kept), (expected, right) = run(KernelSelfAttention), run(SelfAttention)
    check(found, expected)
    check(kept.keys, right.keys)
    assert torch.equal(kept.values, right.values)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 1100])
def test_gate(dtype: torch.dtype, width: int) -> None:
    gate_up = 4 * random(3, 2 * width, dtype=dtype)
    plain, kernel = (kind(lambda *_: gate_up, lambda x, *_: x, silu) for kind in (GatedMLP, KernelGatedMLP))
    check(kernel(gate_up[:, :1]), plain(gate_up[:, :1]))
    gate_up[0, 0], gate_up[1, 1] = -torch.inf, torch.inf
    assert torch.equal(kernel(gate_up[:, :1]).isfinite(), plain(gate_up[:, :1]).isfinite())


def test_another_rotation_is_left_to_torch() -> None:
    """The kernel reads the table by the position in the sequence alone."""
    rope = Rope(frequencies(8, 100.0), 40, torch.float32, DEVICE)
    layers = [PreNorm(abs, SelfAttention(0, 1, 1, 8, abs, abs, one), abs, abs) for one in (rope, in_turn(rope))]  # type: ignore[arg-type]
    embedding = Embedding(PlainTable("", torch.zeros(1, 1)))
    made: list[Any] = list(with_kernels(Decoder(embedding, layers, abs, abs)).layers)  # type: ignore[arg-type]
    assert [type(layer.attention) for layer in made] == [KernelSelfAttention, SelfAttention]
