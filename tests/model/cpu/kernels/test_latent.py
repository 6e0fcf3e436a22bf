"""Kernels of latent attention around the attention itself, beside torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cache_manager.layout import KVLayout, KVShape, LayerGroup
from model.cpu.attention_backend import CpuAttention
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.by_head import by_head_call
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.latent import LatentsKind, latents_call
from model.cpu.kernels.panels import PlainPanels
from model.cpu.kernels.product import KernelLinear, KernelWeights, NotCompiled
from model.cpu.kernels.program import Machine
from model.rope import Rope, frequencies, rotate
from tests.model.cpu.kernels.test_rows import ROWS, TOLERANCE, Cells, elements, random
from tests.support.pages import exported

EPS = 1e-3


def products(machine: Machine, element: Element, heads: int, width: int, out: int) -> list[KernelLinear]:
    weights = random(heads, out, width, seed=1).to(element.dtype)
    return [KernelLinear(machine, [KernelWeights(PlainPanels(element), weight)]) for weight in weights]


@elements
@pytest.mark.parametrize("rows", [1, 5, 70, 300])
def test_each_head_has_a_product_of_its_own(machine: Machine, element: Element, rows: int) -> None:
    heads, width, out, room = 3, 48, 64, 80  # outputs of a head stand in the first part of its room
    x, cells = random(rows, heads * width), Cells(rows)
    source, y = Buffer.copy_of(x, element), Buffer.of(rows, heads * room, element)
    y.tensor.fill_(7.0)
    made = products(machine, element, heads, width, out)
    machine.program([by_head_call(made, cells[0], source, y, room)]).run()
    found = y.tensor[:rows, : heads * room].view(rows, heads, room)
    weights = random(heads, out, width, seed=1).to(element.dtype).double()
    expected = torch.einsum("rhi,hoi->rho", x.to(element.dtype).double().view(rows, heads, width), weights)
    np.testing.assert_allclose(found[..., :out].double(), expected, atol=TOLERANCE[element] * 10, rtol=1e-2)
    assert (found[..., out:] == 7.0).all()


def test_outputs_that_would_reach_into_the_next_head_are_refused(machine: Machine) -> None:
    x, y = Buffer.of(1, 96, FLOAT), Buffer.of(1, 96, FLOAT)
    with pytest.raises(NotCompiled, match="48 outputs, no multiple of 32"):
        by_head_call(products(machine, FLOAT, 2, 48, 48), Cells(1)[0], x, y, 48)


@elements
@pytest.mark.parametrize("page_size", [16, 3])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("pairs", [16, 32])
def test_keys_and_parts_of_queries(
    machine: Machine, element: Element, page_size: int, neighbours: bool, scaled: bool, pairs: int
) -> None:
    heads, plain, rank = 3, 48, 80
    width, dim = plain + 2 * pairs, rank + 2 * pairs
    layout = KVLayout((LayerGroup((0,), KVShape(1, dim, rank, latent=True)),), page_size, element.size)
    attention = CpuAttention(machine, layout, 40, heads, str(element.dtype).removeprefix("torch."))
    latents, raw, weight = random(ROWS, dim), random(ROWS, heads * width, seed=1), random(rank, seed=2)
    positions, slots = np.array([5, 6, 0, 40, 63]), np.array([1, 17, 33, 16, 2])
    rope = Rope(frequencies(2 * pairs, 1e4), 64, torch.float32, torch.device("cpu"))
    tables = (F.pad(table, (0, 0, 0, 16)) for table in rope.tables)
    cells = Cells(ROWS, slots.ctypes.data, positions.ctypes.data)
    scales = 1 + torch.arange(64) / 64
    sources = [Buffer.copy_of(part, FLOAT) for part in (latents, raw)]
    queries, plains = torch.full((ROWS, heads, dim), 7.0, dtype=element.dtype), Buffer.of(ROWS, heads * plain, element)
    arguments = (
        cells[0], cells[1], cells[2], *(part for one in sources for part in (one.tensor, one.stride)), plains.tensor,
        plains.stride, queries, attention.pool_of(0), heads, plain, rank, pairs, *tables, weight, scales, EPS,
    )  # fmt: skip
    call = latents_call(attention.heads_of(0), arguments, LatentsKind(neighbours=neighbours, scaled=scaled))
    machine.program([call]).run()

    def turned(x: torch.Tensor) -> torch.Tensor:
        x = torch.cat((x[..., ::2], x[..., 1::2]), -1) if neighbours else x
        return rotate(x, *rope.at(torch.from_numpy(positions)[None]))

    by_head = (raw * scales[positions].unsqueeze(1) if scaled else raw).view(ROWS, heads, width)
    key = torch.cat((F.rms_norm(latents[:, :rank], (rank,), weight, EPS), turned(latents[:, None, rank:])[:, 0]), -1)
    near = {"atol": TOLERANCE[element], "rtol": TOLERANCE[element] / 2}
    pages = exported(attention, range(40)).view(element.dtype).view(40, page_size, dim)
    np.testing.assert_allclose(pages[slots // page_size, slots % page_size].double(), key.double(), **near)
    assert torch.equal(
        plains.tensor[:, : heads * plain], by_head[..., :plain].reshape(ROWS, heads * plain).to(element.dtype)
    )
    np.testing.assert_allclose(queries[..., rank:].double(), turned(by_head[..., plain:]).double(), **near)
    assert (queries[..., :rank] == 7.0).all()
    written = torch.zeros(40 * page_size, dtype=torch.bool)
    written[slots] = True
    assert not pages.view(40 * page_size, dim)[~written].any()
