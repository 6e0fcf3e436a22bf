"""Mixtures of experts beside torch's: who goes where, what comes out; the bits of a row whatever stands beside it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import BFLOAT, FLOAT, Element
from model.cpu.kernels.experts import JOB, Routes, write_jobs, write_mixed, write_weighed
from model.cpu.kernels.product import KernelLinear, NotCompiled, experts_call
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.sides import MOST_ROWS
from model.cpu.mixtures import choice_call
from model.routing import AnyRouting, Groups, Routing, SparseMixer
from tests.support.kernels import kernel_linear

HIDDEN, INNER = 64, 40
TOLERANCE = {FLOAT: 2e-5, BFLOAT: 3e-2}
each_element = pytest.mark.parametrize("element", [FLOAT, BFLOAT], ids=lambda e: e.name)
each_kind = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def jobs_call(routes: Routes, rows: Tensor) -> Call:
    """rows: int64 [1]."""
    arguments = rows, routes.used, routes.experts, routes.chosen, routes.order, routes.jobs, routes.count
    return Call("jobs", write_jobs, arguments)


def routed(machine: Machine, logits: Tensor, routing: AnyRouting) -> Routes:
    count, experts = logits.shape
    routes, rows = Routes.of(count, experts, routing.used), torch.tensor([count])
    calls = [choice_call(routing, routes, rows, Buffer.copy_of(logits, FLOAT)), jobs_call(routes, rows)]
    machine.program(calls).run()
    return routes


@pytest.mark.parametrize(("experts", "used"), [(1, 1), (5, 2), (8, 8), (16, 3), (60, 4), (128, 8), (1000, 33)])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("by_sigmoid", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_choice_is_that_of_plain_numpy(
    machine: Machine, experts: int, used: int, normalised: bool, by_sigmoid: bool, biased: bool
) -> None:
    bias = random(experts, seed=1) / 4 if biased else None
    check(
        machine, random(7, experts) * 3, Routing(used, normalised, by_sigmoid, bias, None, 2.5 if normalised else 1.0)
    )


def test_weights_are_divided_by_no_smaller_sum(machine: Machine) -> None:
    logits, least = random(20, 16) * 2, 0.6
    smaller = torch.softmax(logits, -1).topk(2).values.sum(-1) < least
    assert 5 < smaller.sum() < 15
    check(machine, logits, Routing(2, True, least=least))


@pytest.mark.parametrize("normalised", [False, True])
def test_experts_have_scales_of_their_own(machine: Machine, normalised: bool) -> None:
    check(machine, random(7, 40) * 2, Routing(3, normalised, scales=random(40, seed=3)))


@pytest.mark.parametrize(
    ("experts", "count", "of_token", "used"),
    [(8, 4, 2, 3), (64, 8, 3, 6), (256, 8, 4, 8), (60, 3, 1, 20), (18, 3, 2, 5)],
)
@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize("by_sigmoid", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_groups(
    machine: Machine, experts: int, count: int, of_token: int, used: int, best: int, by_sigmoid: bool, biased: bool
) -> None:
    bias = random(experts, seed=2) / 4 if biased else None
    check(machine, random(9, experts) * 2, Routing(used, True, by_sigmoid, bias, Groups(count, of_token, best)))


def check(machine: Machine, logits: Tensor, routing: Routing) -> None:
    """Kernel and torch choose as the plain statement does, expert by expert."""
    routes = routed(machine, logits, routing)
    by_torch = routing(logits)
    for row, line in enumerate(logits.double().numpy()):
        scores = 1 / (1 + np.exp(-line)) if routing.by_sigmoid else np.exp(line) / np.exp(line).sum()
        ranks = scores if routing.bias is None else scores + routing.bias.double().numpy()
        allowed = range(len(line))
        if routing.groups is not None:
            groups = [list(part) for part in np.arange(len(line)).reshape(routing.groups.count, -1)]
            groups.sort(key=lambda group: -sum(sorted(ranks[group])[-routing.groups.best :]))
            allowed = [expert for group in groups[: routing.groups.used] for expert in group]
        chosen = sorted(allowed, key=lambda expert: -ranks[expert])[: routing.used]
        weights = (
            scores[chosen] / (max(scores[chosen].sum(), routing.least) if routing.normalised else 1.0) * routing.factor
        )
        weights = weights if routing.scales is None else weights * routing.scales.double().numpy()[chosen]
        mine = slice(row * routing.used, (row + 1) * routing.used)
        assert routes.chosen[mine].tolist() == by_torch[1][row].tolist() == chosen
        np.testing.assert_allclose(routes.weights[mine], weights, rtol=1e-5)
        np.testing.assert_allclose(by_torch[0][row], weights, rtol=1e-5)


@pytest.mark.parametrize("experts", [2, 5, 16, 33])
@pytest.mark.parametrize("band", [0.0, 0.02, 0.5, 2.5])
@pytest.mark.parametrize("above", [-4.0, 0.0, 4.0])
def test_a_sparse_mixer_is_that_of_plain_numpy(machine: Machine, experts: int, band: float, above: float) -> None:
    """Logits of one sign too: a share of the larger size is another number then."""
    logits, routing = random(40, experts) + above, SparseMixer(band)
    routes, (torch_weights, torch_chosen) = routed(machine, logits, routing), routing(logits)
    for row, line in enumerate(logits.double().numpy()):
        chosen, weights, left = list[int](), list[float](), list(range(experts))
        for _ in range(2):
            best = max(left, key=lambda expert: line[expert])
            near = [e for e in left if (line[best] - line[e]) / max(abs(line[e]), line[best]) <= band]
            weights.append(1 / sum(np.exp(line[expert] - line[best]) for expert in near))
            chosen.append(best)
            left.remove(best)
        assert routes.chosen[2 * row : 2 * row + 2].tolist() == torch_chosen[row].tolist() == chosen
        np.testing.assert_allclose(routes.weights[2 * row : 2 * row + 2], weights, rtol=1e-5)
        np.testing.assert_allclose(torch_weights[row], weights, rtol=1e-5)


def test_a_sparse_mixer_has_nan_for_nan_and_the_first_of_equal_logits(machine: Machine) -> None:
    logits = torch.zeros(3, 20)
    logits[1, [7, 18]] = 1.0
    logits[2, 5] = torch.nan
    routes = routed(machine, logits, SparseMixer(0.02))
    assert routes.chosen[:4].tolist() == [0, 1, 7, 18]
    np.testing.assert_allclose(routes.weights[:4], [1 / 20, 1 / 19, 1 / 2, 1.0], rtol=1e-6)
    assert routes.weights[4:].isnan().all()


def test_of_equal_logits_the_first(machine: Machine) -> None:
    logits = torch.zeros(2, 20)
    logits[1, [7, 18]] = 1.0
    assert routed(machine, logits, Routing(3, False)).chosen.tolist() == [0, 1, 2, 7, 18, 0]


@pytest.mark.parametrize("rows", [1, 2, 200])
def test_jobs_hold_every_place_once_by_expert(machine: Machine, rows: int) -> None:
    logits = random(rows, 6)
    logits[:, 4] += 100.0  # one that all rows go to, and one that none does
    logits[:, 1] -= 100.0
    routes = routed(machine, logits, Routing(2, False))
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

    def __init__(
        self,
        machine: Machine,
        element: Element,
        quantized: bool,
        experts: int = 6,
        used: int = 3,
        limit: float | None = None,
        weighs_inputs: bool = False,
    ) -> None:
        """limit: of the gates of experts that have biases too. weighs_inputs: see `model.blocks.Experts`."""
        self.weighs_inputs = weighs_inputs
        self.machine, self.element, self.experts, self.used = machine, element, experts, used
        self.gate_up = [random(2 * INNER, HIDDEN, seed=i) / 8 for i in range(experts)]
        self.down = [random(HIDDEN, INNER, seed=100 + i) / 6 for i in range(experts)]

        self.limit, scale = limit, 0.0 if limit is None else 0.3
        self.biases = [
            (random(2 * INNER, seed=200 + i) * scale, random(HIDDEN, seed=300 + i) * scale) for i in range(experts)
        ]

        def products(weights: list[Tensor], gated: bool) -> list[KernelLinear]:
            biases = [None if limit is None else pair[0 if gated else 1] for pair in self.biases]
            return [
                kernel_linear(machine, [w], bias, element, gated, quantized)
                for w, bias in zip(weights, biases, strict=True)
            ]

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
        read, weights, weighed = source, routes.weights, list[Call]()
        if self.weighs_inputs:
            read, weights = Buffer.of(len(x) * used, HIDDEN, self.element), routes.ones
            of_input = (rows, used, routes.weights, source.tensor, source.stride, read.tensor, read.stride, HIDDEN)
            weighed = [Call(f"weighed_{self.element.name}", write_weighed(self.element), of_input)]
        arguments = (
            rows, used, weights, parts.tensor, parts.stride, y.tensor, y.stride, HIDDEN
        )  # fmt: skip
        add = before is not None
        calls = [
            choice_call(Routing(used, True), routes, rows, scores),
            jobs_call(routes, rows),
            *weighed,
            experts_call(
                self.products[0],
                routes,
                read,
                inner,
                gather=True,
                activation="silu",
                limit=self.limit,
                by_place=self.weighs_inputs,
            ),
            experts_call(self.products[1], routes, inner, parts, gather=False),
            Call(f"mixed{'_add' if add else ''}", write_mixed(add), arguments),
        ]
        self.machine.program(calls).run()
        return y.tensor[:, :HIDDEN].clone()

    def expected(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.to(self.element.dtype).double()
        weights, chosen = torch.topk(torch.softmax(logits.double(), -1), self.used, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        every, weighed = [], x
        if self.weighs_inputs:  # an expert's weight, 0 for one that is not chosen
            by_expert = torch.zeros(logits.shape, dtype=torch.double).scatter(1, chosen, weights)
            weights = torch.ones_like(weights)
        for number, (gate_up, down, biases) in enumerate(zip(self.gate_up, self.down, self.biases, strict=True)):
            if self.weighs_inputs:
                weighed = (x * by_expert[:, number, None]).to(self.element.dtype).double()
            gate, up = (weighed @ gate_up.to(self.element.dtype).double().T + biases[0]).chunk(2, -1)
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
            every.append(F.silu(gate) * up @ down.to(self.element.dtype).double().T + biases[1])
        of_row = torch.stack(every, 1).gather(1, chosen.unsqueeze(-1).expand(-1, -1, HIDDEN))
        return (of_row * weights.unsqueeze(-1)).sum(1)


@each_element
@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_equals_the_sum_of_experts(machine: Machine, element: Element, rows: int, limit: float | None) -> None:
    mixture, x, logits, before = (
        Mixture(machine, element, False, limit=limit),
        random(rows, HIDDEN),
        random(rows, 6),
        random(rows, HIDDEN, seed=1),
    )
    expected = mixture.expected(x, logits)
    np.testing.assert_allclose(mixture.made(x, logits), expected, atol=TOLERANCE[element], rtol=TOLERANCE[element])
    found = mixture.made(x, logits, before)
    np.testing.assert_allclose(found, expected + before, atol=TOLERANCE[element], rtol=TOLERANCE[element])


@each_element
@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_inputs_that_are_weighed(machine: Machine, element: Element, rows: int) -> None:
    mixture = Mixture(machine, element, False, weighs_inputs=True)
    x, logits, before = random(rows, HIDDEN), random(rows, 6), random(rows, HIDDEN, seed=1)
    found, whole = mixture.made(x, logits, before), mixture.expected(x, logits) + before
    np.testing.assert_allclose(found, whole, atol=TOLERANCE[element], rtol=TOLERANCE[element])
    assert torch.equal(mixture.made(x[:1], logits[:1], before[:1]), found[:1])


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
    for wrong in (products, [products[0], biased]):
        with pytest.raises(NotCompiled, match="its experts differ in shape, or some have biases"):
            experts_call(wrong, Routes.of(1, 2, 1), x, x, gather=True)


def test_experts_in_several_formats_are_refused(machine: Machine) -> None:
    """One kernel would read the panels of each in the layout of the first, past their end."""
    products = [kernel_linear(machine, [random(32, 32)], None, FLOAT, quantized=eight) for eight in (False, True)]
    x = Buffer.of(1, 32, FLOAT)
    for order in (products, products[::-1]):
        with pytest.raises(NotCompiled, match="its experts are in several weight formats"):
            experts_call(order, Routes.of(1, 2, 1), x, x, gather=True)
