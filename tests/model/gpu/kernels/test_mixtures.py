"""Mixtures of experts by kernels, beside plain statements of what they compute; planted faults."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.blocks import MLP, Experts, GatedMLP
from model.gpu import expert_weights, mixtures
from model.gpu.expert_weights import TILES, PlainExperts, ProductTiles, Scattered
from model.gpu.mixtures import MOST_PLACES, KernelExperts, arrange, choose
from model.layers import Activation, Linear, gelu_tanh, relu2, silu
from model.routing import AnyRouting, Groups, Routing, SparseMixer
from model.weight_formats.groups import bring_back
from model.weight_formats.levels import E2M1, E4M3, INT4, INT8, Levels
from tests.model.gpu.kernels.device import DEVICE, compute_in
from tests.model.gpu.kernels.test_group_product import ROUNDING, drawn, numbers, product_of

DTYPES = [getattr(torch, compute_in(name)) for name in ("float32", "float16", "bfloat16")]


class WideLinear:
    """A product in float64."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.double(), bias

    def __call__(self, x: Tensor, _: Any = None) -> Tensor:
        y = x.double() @ self.weight.T
        return y if self.bias is None else y + self.bias.double()


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU has them, not packed for a CPU."""
    monkeypatch.setattr("model.layers.onednn_multiplies", lambda _: False)


def random_scales(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).uniform(0.2, 1.5, count)).float()


ROUTINGS: dict[str, Routing] = {
    "softmax": Routing(2, False),
    "softmax to 1": Routing(3, True),
    "one": Routing(1, False),
    "sigmoid, bias": Routing(3, True, by_sigmoid=True, bias=numbers(12, seed=4) * 0.3, factor=2.5),
    "groups of the best": Routing(3, False, groups=Groups(4, 2, 1), factor=1.5),
    "groups of two, bias": Routing(4, True, by_sigmoid=True, bias=numbers(12, seed=5) * 0.3, groups=Groups(3, 2, 2)),
    "scales": Routing(2, True, scales=random_scales(12)),
    "least": Routing(2, True, by_sigmoid=True, least=1.5),
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chooses_as_the_plain_routing(routing: Routing, dtype: torch.dtype) -> None:
    logits = (numbers(40, 12, seed=3) * 2.0).to(dtype)
    weights, chosen = routing(logits.float())
    moved = on_device(routing)
    found_weights, found = choose(moved, logits.to(DEVICE))
    assert torch.equal(found.cpu().long(), chosen)
    torch.testing.assert_close(found_weights.cpu(), weights, rtol=2e-6, atol=1e-7)


def on_device(routing: Any) -> Any:
    if isinstance(routing, SparseMixer):
        return routing
    moved = [None if one is None else one.to(DEVICE) for one in (routing.bias, routing.scales)]
    return Routing(
        routing.used, routing.normalised, routing.by_sigmoid, moved[0], routing.groups, routing.factor, routing.least,
        moved[1],
    )  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_whatever_logits_are_it_chooses_experts_that_there_are(routing: Routing) -> None:
    """A row that is not finite must not read other memory, nor change what other rows choose."""
    logits = numbers(6, 12, seed=3)
    _, expected = choose(on_device(routing), logits.to(DEVICE))
    hostile = logits.clone()
    hostile[1], hostile[2], hostile[3, :7], hostile[4] = torch.nan, torch.inf, torch.nan, -torch.inf
    _, found = choose(on_device(routing), hostile.to(DEVICE))
    assert ((found >= 0) & (found < 12)).all()
    assert torch.equal(found[[0, 5]], expected[[0, 5]])


def drawn_choices(tokens: int, used: int, experts: int, seed: int) -> Tensor:
    """Returns distinct experts of each token, some chosen often and some never."""
    rng = np.random.default_rng(seed)
    likely = rng.dirichlet(np.full(experts, 0.5)) + 1e-9
    rows = [rng.choice(experts, used, replace=False, p=likely / likely.sum()) for _ in range(tokens)]
    return torch.from_numpy(np.array(rows)).int()


@pytest.mark.parametrize(
    ("tokens", "used", "experts"), [(1, 2, 4), (2, 1, 16), (2, 2, 4), (7, 3, 5), (90, 4, 11), (400, 6, 6), (700, 2, 3)]
)
def test_each_place_is_in_one_tile_of_its_expert(tokens: int, used: int, experts: int) -> None:
    chosen = drawn_choices(tokens, used, experts, seed=tokens)
    routes = arrange(torch.ones(chosen.shape), chosen.to(DEVICE), experts, (16, 32, 64, 128))
    flat = chosen.flatten().tolist()
    if routes.direct:
        assert (routes.most, routes.order.flatten().tolist()) == (len(flat), flat)
        return
    tiles, order = routes.tiles.tolist(), routes.order.tolist()
    assert len(tiles) == routes.most
    found = []
    for expert, start, count in (tile for tile in tiles if tile[2]):
        assert 0 < count <= routes.rows
        own = order[start : start + count]
        assert [flat[place] for place in own] == [expert] * count
        found += own
    assert found == sorted(range(len(flat)), key=lambda place: (flat[place], place))


def mixture_of(
    experts: int, hidden: int, width: int, dtype: torch.dtype, routing: AnyRouting, gate: bool = True,
    activation: Activation = silu, biased: bool = False, limit: float | None = None, weighs_inputs: bool = False,
    wide: bool = False,
) -> Experts:  # fmt: skip
    """wide: computes all but the routing in float64, with the same weights."""
    seeds = iter(range(10_000))

    def linear(inputs: int, outputs: int) -> Any:
        weight = (numbers(outputs, inputs, seed=next(seeds)) * 0.2).to(dtype)
        bias = numbers(outputs, seed=next(seeds)).to(dtype) if biased else None
        if wide:
            return WideLinear(weight, bias)
        return Linear(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))

    def expert() -> Any:
        if gate:
            return GatedMLP(linear(hidden, 2 * width), linear(width, hidden), activation, limit)
        return MLP(linear(hidden, width), linear(width, hidden), activation)

    router = (numbers(experts, hidden, seed=77) * 0.5).to(dtype)
    product: Any = WideLinear(router, None) if wide else Linear(router.to(DEVICE))
    parts = [expert() for _ in range(experts)]
    return Experts(product, parts, routing if wide else on_device(routing), weighs_inputs=weighs_inputs)


SHAPES = {
    "silu": {},
    "gelu with biases": {"activation": gelu_tanh, "biased": True},
    "limit": {"limit": 1.0, "biased": True},
    "no gates": {"gate": False, "activation": relu2},
    "weighed inputs": {"weighs_inputs": True},
}


def both(tokens: int, dtype: torch.dtype, routing: AnyRouting, experts: int = 6, **shape: Any) -> tuple[Tensor, Tensor]:
    """Returns what the kernels give, and the same in float64."""
    x = numbers(tokens, 48, seed=tokens).to(dtype)
    made = KernelExperts.of(mixture_of(experts, 48, 40, dtype, routing, **shape))
    assert made is not None
    found = made(x.to(DEVICE)).cpu()
    assert (found.dtype, found.shape) == (dtype, x.shape)
    return found.double(), mixture_of(experts, 48, 40, dtype, routing, wide=True, **shape)(x.double())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [1, 5, 60])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixture_gives_what_its_experts_give(shape: dict[str, Any], tokens: int, dtype: torch.dtype) -> None:
    found, expected = both(tokens, dtype, Routing(2, True), **shape)
    # A sum is rounded by the size of its parts, which may cancel out: the largest output is about as large as these.
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=8 * ROUNDING[dtype], atol=8 * ROUNDING[dtype] * largest)


def test_a_mixture_by_sparse_mixer() -> None:
    found, expected = both(9, torch.float16, SparseMixer(0.1))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [2, 20, 45, 90])
def test_tiles_of_all_sizes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows in a tile, and more, and products that fill their tiles."""
    of_rows = tuple(ProductTiles(rows, 16, 16, 4, 2) for rows in (16, 32, 64, 128))
    monkeypatch.setattr(expert_weights, "tiles_for", lambda _: of_rows)
    few, some, more = MOST_PLACES
    assert 2 * 2 < 3 * few < 2 * 20 < 3 * some < 2 * 45 < 3 * more < 2 * 90
    found, expected = both(tokens, torch.float32, Routing(2, True), experts=3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("products_by_row")
def test_a_token_has_its_bits_beside_any_others() -> None:
    made = KernelExperts.of(mixture_of(6, 48, 40, torch.float16, Routing(2, True)))
    assert made is not None
    x = numbers(40, 48, seed=2).half().to(DEVICE)
    alone, among = made(x[:1]), made(x)
    assert torch.equal(alone[0], among[0])
    poisoned = x.clone()
    poisoned[1:30:3] = torch.nan
    kept = [i for i in range(40) if i not in range(1, 30, 3)]
    assert torch.equal(made(poisoned)[kept], among[kept])


def no_distances(tensors: Any) -> Any:
    found = Scattered.of(tensors)
    return found and found._replace(at=torch.zeros_like(found.at))


def one_row_less(*arguments: Any) -> Any:
    found = arrange(*arguments)
    found.tiles[0, 2] -= 1
    return found


@pytest.mark.parametrize("fault", ["the first expert for all", "a row is not computed", "no weights of experts"])
def test_the_comparison_sees(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "the first expert for all":
        monkeypatch.setattr(PlainExperts, "of", classmethod(
            lambda cls, given: cls(no_distances([one.weight for one in given]), None, True, TILES, given)
        ))  # fmt: skip
    elif fault == "a row is not computed":
        monkeypatch.setattr(mixtures, "arrange", one_row_less)
    else:
        monkeypatch.setattr(mixtures, "choose", lambda *of: (torch.ones_like(choose(*of)[0]), choose(*of)[1]))
    found, expected = both(20, torch.float32, Routing(2, True))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("levels", [INT4, INT8, E2M1, E4M3], ids=lambda levels: levels.name)
@pytest.mark.parametrize("offsets", [False, True], ids=["scales", "offsets"])
@pytest.mark.parametrize(("tokens", "biased"), [(1, True), (12, False), (130, False)])
def test_weights_in_groups(levels: Levels, offsets: bool, tokens: int, biased: bool) -> None:
    dtype, experts, stored = DTYPES[1], 4, {}
    for expert in range(experts):
        for name, (out, width) in {"first": (80, 64), "down": (64, 40)}.items():
            stored[name, expert] = drawn(levels, out, width, 32, offsets, seed=len(stored))

    def bias(name: str, expert: int) -> Tensor | None:
        return numbers(80 if name == "first" else 64, seed=expert).to(dtype) if biased else None

    def product(name: str, expert: int) -> Any:
        form, weight = stored[name, expert]
        own = bias(name, expert)
        return product_of(form, [weight], dtype, None if own is None else own.to(DEVICE))

    def wide(name: str, expert: int) -> Any:
        form, weight = stored[name, expert]
        return WideLinear(bring_back(form.groups(weight)).to(dtype), bias(name, expert))

    router = (numbers(experts, 64, seed=77) * 0.5).to(dtype)
    # Weights of the drawn size make numbers that float16 cannot hold: rows are smaller instead.
    x = (numbers(tokens, 64, seed=9) * 0.05).to(dtype)
    parts = [GatedMLP(product("first", i), product("down", i), silu) for i in range(experts)]
    made = KernelExperts.of(Experts(Linear(router.to(DEVICE)), parts, Routing(2, True)))
    assert made is not None
    found = made(x.to(DEVICE)).cpu().double()
    expected = Experts(WideLinear(router, None), [
        GatedMLP(wide("first", i), wide("down", i), silu) for i in range(experts)
    ], Routing(2, True))(x.double())  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
