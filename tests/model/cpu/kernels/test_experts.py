"""Mixtures of experts beside torch's: who goes where, what comes out; the bits of a row whatever stands beside it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import BFLOAT, FLOAT, Element
from model.cpu.kernels.experts import JOB, Routes, write_choice, write_jobs, write_mixed
from model.cpu.kernels.product import KernelLinear, NotCompiled, experts_call
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.sides import MOST_ROWS
from tests.support.kernels import kernel_linear

HIDDEN, INNER = 64, 40
TOLERANCE = {FLOAT: 2e-5, BFLOAT: 3e-2}
each_element = pytest.mark.parametrize("element", [FLOAT, BFLOAT], ids=lambda e: e.name)
each_kind = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def routing(routes: Routes, rows: Tensor, logits: Buffer, normalised: bool) -> list[Call]:
    """rows: int64 [1]."""
    return [
        Call(
            f"choice{'_normalised' if normalised else ''}",
            write_choice(normalised),
            (
                rows, logits.tensor, logits.stride, routes.experts, routes.used, routes.chosen,
                routes.weights,
            ),
        ),
        Call(
            "jobs",
            write_jobs,
            (
                rows, routes.used, routes.experts, routes.chosen, routes.order, routes.jobs,
                routes.count,
            ),
        ),
    ]  # fmt: skip


def routed(machine: Machine, logits: Tensor, used: int, normalised: bool = False) -> Routes:
    rows, experts = logits.shape
    routes = Routes.of(rows, experts, used)
    machine.program(routing(routes, torch.tensor([rows]), Buffer.copy_of(logits, FLOAT), normalised)).run()
    return routes


@pytest.mark.parametrize(("experts", "used"), [(1, 1), (5, 2), (8, 8), (16, 3), (60, 4), (128, 8), (1000, 33)])
@pytest.mark.parametrize("normalised", [False, True])
def test_the_choice_is_that_of_torch(machine: Machine, experts: int, used: int, normalised: bool) -> None:
    logits = random(7, experts) * 3
    routes = routed(machine, logits, used, normalised)
    weights, chosen = torch.topk(torch.softmax(logits.double(), -1), used, -1)
    weights = weights / weights.sum(-1, keepdim=True) if normalised else weights
    assert torch.equal(routes.chosen.view(7, used), chosen)
    np.testing.assert_allclose(routes.weights.view(7, used), weights, rtol=1e-5)


def test_of_equal_logits_the_first(machine: Machine) -> None:
    logits = torch.zeros(2, 20)
    logits[1, [7, 18]] = 1.0
    assert routed(machine, logits, 3).chosen.tolist() == [0, 1, 2, 7, 18, 0]


@pytest.mark.parametrize("rows", [1, 2, 200])
def test_jobs_hold_every_place_once_by_expert(machine: Machine, rows: int) -> None:
    logits = random(rows, 6)
    logits[:, 4] += 100.0  # one that all rows go to, and one that none does
    logits[:, 1] -= 100.0
    routes = routed(machine, logits, 2)
    jobs = routes.jobs[: int(routes.count) * len(JOB)].view(-1, len(JOB)).tolist()
    assert [first for _, first, _ in jobs] == list(np.cumsum([0, *(count for _, _, count in jobs)]))[:-1]
    assert sum(count for _, _, count in jobs) == 2 * rows
    assert all(0 < count <= MOST_ROWS for _, _, count in jobs)
    assert sorted(routes.order.tolist()) == list(range(2 * rows))
    experts = [expert for expert, _, _ in jobs]
    assert experts == sorted(experts)
    assert 1 not in experts
    for expert, first, count in jobs:
        places = routes.order[first : first + count]
        assert (routes.chosen[places] == expert).all()
        assert (places.diff() > 0).all()


class Mixture:
    """A mixture with random weights, and what it should make of x [rows, HIDDEN]."""

    def __init__(self, machine: Machine, element: Element, quantized: bool, experts: int = 6, used: int = 3) -> None:
        self.machine, self.element, self.experts, self.used = machine, element, experts, used
        self.gate_up = [random(2 * INNER, HIDDEN, seed=i) / 8 for i in range(experts)]
        self.down = [random(HIDDEN, INNER, seed=100 + i) / 6 for i in range(experts)]

        def products(weights: list[Tensor], gated: bool) -> list[KernelLinear]:
            return [kernel_linear(machine, [w], None, element, gated, quantized) for w in weights]

        self.products = products(self.gate_up, True), products(self.down, False)

    def made(self, x: Tensor, logits: Tensor, before: Tensor | None = None) -> Tensor:
        """before: what is added to."""
        rows, used = torch.tensor([len(x)]), self.used
        routes, scores = Routes.of(len(x), self.experts, used), Buffer.copy_of(logits, FLOAT)
        source, inner = Buffer.copy_of(x, self.element), Buffer.of(len(x) * used, INNER, self.element)
        parts, y = Buffer.of(len(x) * used, HIDDEN, FLOAT), Buffer.of(len(x), HIDDEN, FLOAT)
        parts.tensor.fill_(torch.nan)
        if before is not None:
            y.tensor[:, :HIDDEN] = before
        arguments = (
            rows, used, routes.weights, parts.tensor, parts.stride, y.tensor, y.stride, HIDDEN
        )  # fmt: skip
        add = before is not None
        calls = [
            *routing(routes, rows, scores, normalised=True),
            experts_call(self.products[0], routes, source, inner, gather=True, activation="silu"),
            experts_call(self.products[1], routes, inner, parts, gather=False),
            Call(f"mixed{'_add' if add else ''}", write_mixed(add), arguments),
        ]
        self.machine.program(calls).run()
        return y.tensor[:, :HIDDEN].clone()

    def expected(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.to(self.element.dtype).double()
        weights, chosen = torch.topk(torch.softmax(logits.double(), -1), self.used, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        every = []
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            gate, up = (x @ gate_up.to(self.element.dtype).double().T).chunk(2, -1)
            every.append(F.silu(gate) * up @ down.to(self.element.dtype).double().T)
        of_row = torch.stack(every, 1).gather(1, chosen.unsqueeze(-1).expand(-1, -1, HIDDEN))
        return (of_row * weights.unsqueeze(-1)).sum(1)


@each_element
@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_equals_the_sum_of_experts(machine: Machine, element: Element, rows: int) -> None:
    mixture, x, logits, before = (
        Mixture(machine, element, False),
        random(rows, HIDDEN),
        random(rows, 6),
        random(rows, HIDDEN, seed=1),
    )
    expected = mixture.expected(x, logits)
    np.testing.assert_allclose(mixture.made(x, logits), expected, atol=TOLERANCE[element], rtol=TOLERANCE[element])
    found = mixture.made(x, logits, before)
    np.testing.assert_allclose(found, expected + before, atol=TOLERANCE[element], rtol=TOLERANCE[element])


def test_with_weights_of_8_bits(machine: Machine) -> None:
    mixture, x, logits = Mixture(machine, FLOAT, True), random(90, HIDDEN), random(90, 6)
    np.testing.assert_allclose(mixture.made(x, logits), mixture.expected(x, logits), atol=0.05)


@each_element
@each_kind
def test_bits_of_a_row_are_its_own(machine: Machine, element: Element, quantized: bool) -> None:
    """Beside others or alone, in any order, with any number of threads."""
    mixture, x, logits = Mixture(machine, element, quantized), random(150, HIDDEN), random(150, 6)
    whole = mixture.made(x, logits)
    for rows in (slice(0, 1), slice(149, 150), slice(20, 29), slice(3, 140)):
        assert torch.equal(mixture.made(x[rows], logits[rows]), whole[rows])
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(150))
    assert torch.equal(mixture.made(x[shuffled], logits[shuffled]), whole[shuffled])
    threads = torch.get_num_threads()
    try:
        for other in (1, 3):
            torch.set_num_threads(other)
            assert torch.equal(mixture.made(x, logits), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("sick", ["logits", "x"])
def test_rows_that_are_not_finite_stay_alone(machine: Machine, sick: str) -> None:
    mixture, given = Mixture(machine, FLOAT, False), {"x": random(20, HIDDEN), "logits": random(20, 6)}
    whole = mixture.made(**given)
    given[sick][3, 2] = torch.nan
    found = mixture.made(**given)
    assert found[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(found[others], whole[others])


def test_experts_that_differ_are_refused(machine: Machine) -> None:
    products = [kernel_linear(machine, [random(32, inputs)], None, FLOAT) for inputs in (32, 64)]
    biased = kernel_linear(machine, [random(32, 32)], random(32), FLOAT)
    x = Buffer.of(1, 64, FLOAT)
    for wrong in (products, [biased]):
        with pytest.raises(NotCompiled, match="its experts have biases or differ in shape"):
            experts_call(wrong, Routes.of(1, 2, 1), x, x, gather=True)


def test_experts_in_several_formats_are_refused(machine: Machine) -> None:
    """One kernel would read the panels of each in the layout of the first, past their end."""
    products = [kernel_linear(machine, [random(32, 32)], None, FLOAT, quantized=eight) for eight in (False, True)]
    x = Buffer.of(1, 32, FLOAT)
    for order in (products, products[::-1]):
        with pytest.raises(NotCompiled, match="its experts are in several weight formats"):
            experts_call(order, Routes.of(1, 2, 1), x, x, gather=True)
