"""Kernels over rows, beside torch: norms, embedding, rounding, heads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cache_manager.layout import KVLayout
from model.cpu.attention_backend import CpuAttention, why_not
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import BFLOAT, FLOAT, Element
from model.cpu.kernels.embedding import write_embedding
from model.cpu.kernels.heads import HeadNorm, write_head_squares, write_heads
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.rows import Norm, write_norm, write_rounded
from model.rope import Rope, frequencies, rotate
from tests.support.pages import exported

ROWS = 5
TOLERANCE = {FLOAT: 1e-5, BFLOAT: 2e-2}
elements = pytest.mark.parametrize("element", [FLOAT, BFLOAT], ids=lambda e: e.name)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


class Cells:
    """Numbers by address."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = np.array(numbers, np.int64)

    def __getitem__(self, number: int) -> int:
        return self._numbers.ctypes.data + 8 * number


@elements
@pytest.mark.parametrize("width", [16, 64, 576])
@pytest.mark.parametrize("kind", [Norm(), Norm(centred=True), Norm(centred=True, bias=True)], ids=lambda n: n.name)
@pytest.mark.parametrize("add", [False, True])
def test_norms(machine: Machine, element: Element, width: int, kind: Norm, add: bool) -> None:
    x, weight, bias = random(ROWS, width) * 3 + 1, random(width, seed=1), random(width, seed=2)
    before, which = random(3, width, seed=3), torch.tensor([4, 0, 4])
    y, cells = Buffer.copy_of(before, element), Cells(3, which.data_ptr())
    name = f"{kind.name}_{element.name}{'_add' if add else ''}_chosen"
    source = Buffer.copy_of(x, FLOAT)
    arguments = (cells[0], cells[1], source.tensor, source.stride, weight, bias, y.tensor, y.stride, width, 1e-3)
    machine.program([Call(name, write_norm(kind, element, add, chosen=True), arguments)]).run()
    if kind.centred:
        expected = F.layer_norm(
            x[which].double(), (width,), weight.double(), bias.double() if kind.bias else None, 1e-3
        )
    else:
        expected = F.rms_norm(x[which].double(), (width,), weight.double(), 1e-3)
    expected = expected + before.to(element.dtype).double() if add else expected
    found = y.tensor[:3, :width].double()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[element], rtol=TOLERANCE[element] / 2)


@elements
@pytest.mark.parametrize("learned", [False, True])
def test_embedding(machine: Machine, element: Element, learned: bool) -> None:
    table, positions = random(20, 48).to(element.dtype), random(30, 48, seed=1).to(element.dtype)
    ids, places = torch.tensor([3, 19, 0, 3]), torch.tensor([7, 0, 29, 8])
    y, cells = Buffer.of(4, 48, FLOAT), Cells(4, ids.data_ptr(), places.data_ptr())
    arguments = (cells[0], cells[1], cells[2], table, positions, y.tensor, y.stride, 48, 2.5)
    name = f"embedding_{element.name}{'_positions' if learned else ''}"
    machine.program([Call(name, write_embedding(element, learned), arguments)]).run()
    expected = table[ids].float() * 2.5 + (positions[places].float() if learned else 0.0)
    assert torch.equal(y.tensor[:4, :48], expected)


def test_rounded_to_the_even_one(machine: Machine) -> None:
    x = torch.cat((random(3, 64), torch.full((1, 64), 1 + 2**-8), torch.full((1, 64), 1 + 3 * 2**-8)))
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, 3.4e38, -0.0])
    source, y, cells = Buffer.copy_of(x, FLOAT), Buffer.of(ROWS, 64, BFLOAT), Cells(ROWS)
    arguments = (cells[0], 0, source.tensor, source.stride, y.tensor, y.stride, 64)
    machine.program([Call("rounded_bf16", write_rounded(BFLOAT), arguments)]).run()
    assert torch.equal(y.tensor[:ROWS, :64], x.bfloat16())


@elements
def test_chosen_rows_are_rounded(machine: Machine, element: Element) -> None:
    x, which = random(ROWS, 48), torch.tensor([3, 0, 3])
    source, y, cells = Buffer.copy_of(x, FLOAT), Buffer.of(ROWS, 48, element), Cells(3, which.data_ptr())
    arguments = (cells[0], cells[1], source.tensor, source.stride, y.tensor, y.stride, 48)
    machine.program([Call(f"rounded_{element.name}_chosen", write_rounded(element, chosen=True), arguments)]).run()
    assert torch.equal(y.tensor[:3, :48], x[which].to(element.dtype))
    assert not y.tensor[3:].any()


HEAD_NORMS = [
    HeadNorm(Norm()), HeadNorm(Norm(), together=True), HeadNorm(Norm(centred=True, bias=True)),
    HeadNorm(Norm(centred=True), together=True), HeadNorm(Norm(centred=True), own=True),
    HeadNorm(Norm(), after=True), HeadNorm(Norm(), values=True), HeadNorm(Norm(), together=True, ranks=True),
]  # fmt: skip


def normed(kind: HeadNorm, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x: [tokens, heads, dim]."""
    if kind.own:
        return F.layer_norm(x, x.shape[-1:], eps=eps) * weight.view(x.shape[1:])
    row = x.flatten(1) if kind.together else x
    width = row.shape[-1:]
    if kind.norm.centred:
        return F.layer_norm(row, width, weight, bias if kind.norm.bias else None, eps).view(x.shape)
    return F.rms_norm(row, width, weight, eps).view(x.shape)


@elements
@pytest.mark.parametrize(
    ("dim", "pairs", "apart"),
    [(16, 8, 8), (16, 0, 0), (48, 5, 5), (64, 32, 32), (80, 24, 24), (80, 5, 40), (64, 9, 32)],
)
@pytest.mark.parametrize("page_size", [16, 3])
@pytest.mark.parametrize("same", [False, True], ids=["values apart", "values from keys"])
@pytest.mark.parametrize("kind", [None, *HEAD_NORMS], ids=lambda kind: kind.name if kind else "no norm")
def test_heads(
    machine: Machine, element: Element, dim: int, pairs: int, apart: int, page_size: int, same: bool,
    kind: HeadNorm | None,
) -> None:  # fmt: skip
    """Queries, and what the pool then has of keys and values, beside the functions of the torch models.

    With pages of 3 tokens, queries have a factor by position too.
    """
    heads, kv_heads, eps = 4, 2, 1e-3
    first_value = heads if same else heads + kv_heads
    layout = KVLayout.uniform(((0,),), kv_heads, dim, element.size, page_size)
    dtype = str(element.dtype).removeprefix("torch.")
    attention = CpuAttention(machine, layout, 40, heads, dtype)
    qkv = random(ROWS, (heads + 2 * kv_heads) * dim)
    positions, slots = np.array([5, 6, 0, 40, 63]), np.array([1, 17, 33, 16, 2])
    together = kind is not None and (kind.together or kind.own)
    widths = (heads * dim, kv_heads * dim) if together else (dim, dim)
    weights, biases = ([random(width, seed=seed + i) for i, width in enumerate(widths)] for seed in (1, 3))
    of_values, variances = random(dim, seed=5), Buffer.of(ROWS, 16, FLOAT)
    rope = Rope(frequencies(2 * pairs, 1e4), 64, torch.float32, torch.device("cpu"), apart=apart) if pairs else None
    scales = random(64, seed=6)
    tables = tuple(F.pad(table, (0, 0, 0, 16)) for table in rope.tables) if rope else (0, 0)
    source, queries, cells = (
        Buffer.copy_of(qkv, FLOAT), torch.zeros(ROWS, heads, dim, dtype=element.dtype),
        Cells(ROWS, slots.ctypes.data, positions.ctypes.data),
    )  # fmt: skip
    arguments = (
        cells[0], cells[1], cells[2], source.tensor, source.stride, queries, attention.pool_of(0), heads, kv_heads,
        first_value, dim, pairs, apart, *tables, eps, *weights, of_values, *biases, scales,
        variances.tensor, variances.stride,
    )  # fmt: skip
    scaled = page_size == 3
    write = write_heads(element, kind, attention.heads_of(0).rows, scaled=scaled)
    squares = (
        cells[0], source.tensor, source.stride, heads * dim, kv_heads * dim, variances.tensor, variances.stride,
        1.0 / (heads * dim), 1.0 / (kv_heads * dim),
    )  # fmt: skip
    calls = [Call("head_squares", write_head_squares(), squares)] if kind is not None and kind.ranks else []
    machine.program([*calls, Call(attention.heads_name(kind, scaled), write, arguments)]).run()
    q, k, v = qkv.view(ROWS, -1, dim).split((heads, kv_heads, kv_heads), 1)
    v = k if same else v
    if kind is not None and kind.values:
        v = normed(kind, v, of_values, of_values, eps)
    if kind is not None and not kind.after:
        q, k = (normed(kind, part, *given, eps) for part, *given in zip((q, k), weights, biases, strict=True))
    if rope is not None:
        cos, sin = rope.at(torch.from_numpy(positions)[None])
        q, k = rotate(q, cos, sin, apart), rotate(k, cos, sin, apart)
    if kind is not None and kind.after:
        q, k = (normed(kind, part, *given, eps) for part, *given in zip((q, k), weights, biases, strict=True))
    q = q * scales[positions].view(-1, 1, 1) if scaled else q
    near = {"atol": TOLERANCE[element], "rtol": TOLERANCE[element] / 2}
    np.testing.assert_allclose(queries.double(), q.double(), **near)
    pages = exported(attention, range(40)).view(element.dtype).view(40, 2, page_size, kv_heads, dim)
    written = pages[slots // page_size, :, slots % page_size]
    np.testing.assert_allclose(written[:, 0].double(), k.double(), **near)
    if kind is not None and kind.values:
        np.testing.assert_allclose(written[:, 1].double(), v.double(), **near)
    else:
        assert torch.equal(written[:, 1], v.to(element.dtype))
    assert pages.count_nonzero() == written.count_nonzero()


def test_pages_that_kernels_refuse_are_named() -> None:
    layout = KVLayout.uniform(((0,),), 2, 24, 4, 16)
    assert why_not(layout, "float32", 4) == "a head has 24 elements, no multiple of 16 up to 1024"
    assert why_not(KVLayout.uniform(((0,),), 2, 32, 2, 16), "float16", 4) == "there are none for float16"
    assert why_not(KVLayout.uniform(((0,),), 2, 32, 2, 7), "bfloat16", 4) is None
    wide = KVLayout.uniform(((0,),), 1, 512, 4, 16)
    assert why_not(wide, "float32", 256) is None
    assert why_not(wide, "float32", 257) == "257 heads have values of 512 elements, more than 131072 in all"
