"""`TritonAttention` against plain float64 attention and the reference, on ragged slices, random pages and a pool that
is NaN everywhere else; its bits, which depend on the sequence alone; its pages.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend, StepShape
from model.gpu.attention import join_parts
from model.gpu.attention_backend import TritonAttention
from model.gpu.tuning import TileSizes, Tuning
from model.reference.attention_backend import ReferenceAttention
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED, compute_in
from tests.model.test_attention import LAYERS, TOLERANCE, Case, Pool, plain_attention
from tests.support.pages import exported, imported

SMALL = Tuning(few=TileSizes(16, 16, 32, 4, 2), many=TileSizes(32, 16, 64, 4, 2), shared=TileSizes(32, 16, 32, 4, 2))
"""Of which a short sequence has many parts."""

Slices = list[tuple[int, int, int]]


class TritonPool(Pool):
    """kv: dtype of the pages, if not the case's. soft_cap: of the scores. tuning: None for the table's."""

    def __init__(
        self, case: Case, kv: str | None = None, soft_cap: float | None = None, tuning: Tuning | None = SMALL
    ) -> None:
        self.kv, self.soft_cap, self.tuning = kv or case.dtype, soft_cap, tuning
        super().__init__(replace(case, kv=kv))
        self.sinks = None if self.sinks is None else self.sinks.to(DEVICE)

    def _backend(self, layout: KVLayout, pages: int) -> AttentionBackend:
        compute = compute_in(self.case.dtype)
        # One page more, as a runner has one of its own.
        made = TritonAttention(
            layout, pages + 1, self.heads, self.kv, DEVICE, compute, soft_cap=self.soft_cap, tuning=self.tuning
        )
        self.reference = ReferenceAttention(layout, pages, self.heads, self.kv, DEVICE, soft_cap=self.soft_cap)
        self.reference.poison(np.arange(pages, dtype=np.int32))
        return made

    def _random(self, tokens: int, heads: int) -> Tensor:
        return super()._random(tokens, heads).to(DEVICE)

    def slide(self, sequence: int, computed: int) -> None:
        tables = self.tables.copy()
        super().slide(sequence, computed)
        attention, self.attention, self.tables = self.attention, self.reference, tables
        super().slide(sequence, computed)
        self.attention = attention

    def remember(self, slices: Slices, layer: int = 0) -> None:
        """Writes only."""
        for attention in (self.attention, self.reference):
            attention.write(
                layer,
                *(self.packed(part, slices) for part in (self.keys, self.values)),
                attention.plan(self.shape(slices)),
            )

    def as_reference(self, slices: Slices, layer: int = 0) -> list[Tensor]:
        attention, self.attention = self.attention, self.reference
        try:
            return self.step(slices, layer)
        finally:
            self.attention = attention

    def packed(self, tensors: list[Tensor], slices: Slices) -> Tensor:
        return torch.cat([tensors[sequence][start : start + count] for sequence, start, count in slices])


RAGGED = ((0, 17), (15, 1), (16, 1), (0, 1), (33, 5), (70, 1))
CASES = [
    Case(RAGGED, group=3, head_dim=64),
    Case(RAGGED[1:], group=1, head_dim=16, page_size=1, kv_heads=3, windows=(None, 20)),
    Case(RAGGED[2:], group=2, head_dim=80, page_size=7, dtype="float16", windows=(1, 33)),
    Case(RAGGED, group=2, head_dim=16, page_size=7, windows=(None, 20), chunked=True),
    Case(RAGGED[3:6], group=8, head_dim=128, page_size=32, dtype="float16"),
    Case(RAGGED[3:6], group=20, head_dim=48, kv_heads=1, dtype="bfloat16"),
    Case(((0, 45), (50, 20)), group=4, head_dim=32, kv_heads=1),
    Case(RAGGED, group=2, head_dim=16, windows=(None, 20), sinks=True),
    Case(RAGGED[3:6], group=3, kv_heads=1, head_dim=512, page_size=7, dtype="float16"),
    Case(RAGGED, group=3, kv_heads=1, head_dim=48, latent=32),
    Case(RAGGED[2:], group=20, kv_heads=1, head_dim=48, page_size=7, dtype="float16", latent=16),
    Case(RAGGED[3:6], group=5, kv_heads=1, head_dim=80, latent=48, windows=(None, 20)),
]


@pytest.fixture(autouse=True)
def few_tokens_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.gpu.pieces.FILLING", 40)


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_attention_and_the_reference(case: Case) -> None:
    pool = TritonPool(case)
    now = [(i, before, count) for i, (before, count) in enumerate(case.lengths)]
    for layer in range(LAYERS) if case.windows else (1,):
        pool.remember([(i, 0, before) for i, before, _ in now if before], layer)
        if layer == LAYERS - 1:
            for i, before, _ in now:
                pool.slide(i, before)
        outputs, others = pool.step(now, layer), pool.as_reference(now, layer)
        for (i, before, count), output, other in zip(now, outputs, others, strict=True):
            expected = plain_attention(
                *(part.double().cpu().numpy() for part in (pool.queries[i][before:], pool.keys[i], pool.values[i])),
                before,
                case.windows[layer] if case.windows else None,
                sinks=pool.sinks,
                chunked=case.chunked,
            )
            assert len(output) == count
            for found in (output, other):
                np.testing.assert_allclose(
                    found.double().cpu().numpy(), expected, atol=1.5 * TOLERANCE[case.dtype], rtol=0
                )


def test_equals_the_reference_with_the_sizes_of_the_table() -> None:
    case = Case(((0, 18), (300, 1), (290, 12)), group=3, kv_heads=1, head_dim=96)
    pool = TritonPool(case, tuning=None)
    now = [(i, before, count) for i, (before, count) in enumerate(case.lengths)]
    pool.remember([(i, 0, before) for i, before, _ in now if before])
    for output, other in zip(pool.step(now), pool.as_reference(now), strict=True):
        torch.testing.assert_close(output, other, atol=2e-5, rtol=0)


SHARING = [
    Case(((70, 1), (90, 1), (41, 1), (66, 1), (3, 1), (0, 18)), group=3, head_dim=32),
    Case(
        ((70, 1), (90, 1), (66, 1), (69, 1), (100, 1)), group=8, head_dim=16, page_size=7, dtype="float16", sinks=True
    ),
    Case(((70, 1), (90, 1), (66, 1), (71, 1)), group=1, head_dim=16, page_size=7, windows=(None, 20)),
    Case(((70, 1), (90, 1), (66, 1), (71, 1)), group=4, kv_heads=1, head_dim=48, page_size=7, latent=32),
]


@pytest.mark.parametrize(("case", "kv"), [*((case, None) for case in SHARING), (SHARING[0], "int8")])
def test_what_sequences_share_is_read_once_for_all(case: Case, kv: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.attention.sharing.SHARERS", 2)
    pool = TritonPool(case, kv)
    pool.share(64, 4)
    now = [(i, before, count) for i, (before, count) in enumerate(case.lengths)]
    for layer in range(LAYERS) if case.windows else (0,):
        pool.remember([(i, 0, before) for i, before, _ in now if before], layer)
        plan = pool.attention.plan(pool.shape(now))
        assert plan.shares
        for output, other in zip(pool.step(now, layer), pool.as_reference(now, layer), strict=True):
            torch.testing.assert_close(output, other, atol=1.5 * TOLERANCE[case.dtype], rtol=0)


@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize("sharers", [2, 9])
def test_plans_for_graphs_give_the_same_bits(case: Case, sharers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their place nor the number of programs that share the work changes a bit."""
    monkeypatch.setattr("model.attention.sharing.SHARERS", sharers)
    pool = TritonPool(case)
    pool.share(64, 4)
    now = [(i, before, 1) for i, (before, count) in enumerate(case.lengths) if count == 1]
    layer = LAYERS - 1
    pool.remember([(i, 0, before) for i, before, _ in now], layer)
    expected = pool.step(now, layer)
    pool.attention.fix((2, 4, 8), (), 128)
    fixed = [pool.attention.plan(pool.shape(some)) for some in (now, now[:3])]
    assert [plan.rows for plan in fixed] == [4 if len(now) == 4 else 8, 4]
    assert fixed[0].packed is fixed[1].packed
    assert fixed[0].groups[0].slots.data_ptr() == fixed[1].groups[0].slots.data_ptr()
    assert pool.attention.plan(pool.shape([(0, 68, 2)])).rows == 0, "two tokens of one sequence"
    again = fixed_step(pool, now, layer)
    for one, other in zip(again, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kv", [None, "int8"])
@pytest.mark.parametrize("sharers", [2, 9])
@pytest.mark.parametrize("case", [*SHARING, CASES[0], CASES[-1]])
def test_plans_for_graphs_of_any_step_give_the_same_bits(
    case: Case, sharers: int, kv: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, slices of few, some and many tokens, and keys that several sequences share, in one launch of each."""
    monkeypatch.setattr("model.attention.sharing.SHARERS", sharers)
    case = replace(case, lengths=(*case.lengths, (30, 7), (0, 45), (5, 25)))
    pool, layer = TritonPool(case, kv), LAYERS - 1
    if case in [replace(one, lengths=case.lengths) for one in SHARING]:
        pool.share(64, 4)
    now = [(i, before, count) for i, (before, count) in enumerate(case.lengths)]
    pool.remember([(i, 0, before) for i, before, _ in now if before], layer)
    expected = pool.step(now, layer)
    tokens = sum(count for _, _, count in now)
    pool.attention.fix((2, 4, 8), (16, 2 * tokens), 128)
    few = [(len(now) - 1, 5, 3)]
    plans = [pool.attention.plan(pool.shape(some)) for some in (now, few)]
    assert [(plan.rows, plan.mixed) for plan in plans] == [(2 * tokens, True), (16, True)]
    assert plans[0].packed is plans[1].packed
    assert plans[0].groups[0].slots.data_ptr() == plans[1].groups[0].slots.data_ptr()
    places = [[launch.header for part in plan.groups[-1].passes for launch in part.launches] for plan in plans]
    assert places[0] == places[1], "what a graph reads"
    together = fixed_step(pool, now, layer)
    for one, other in zip(together, expected, strict=True):
        assert torch.equal(one, other)


def test_a_step_too_large_for_graphs_has_the_launches_of_one_without() -> None:
    """Not those of graphs for any step, whose programs look for their pieces one after the other."""
    pool = TritonPool(Case(((0, 45), (5, 25)), group=2, head_dim=16))
    now = [(0, 0, 45), (1, 5, 25)]

    def launches() -> list[tuple[TileSizes, bool, bool, int]]:
        plan = pool.attention.plan(pool.shape(now))
        assert plan.rows == 0
        found = [one for group in plan.groups for part in group.passes for one in part.launches]
        return [(one.sizes, one.divided, one.looped, one.programs) for one in found]

    expected = launches()
    pool.attention.fix((2, 4, 8), (16, 64), 128)
    assert launches() == expected


def fixed_step(pool: TritonPool, now: Slices, layer: int) -> list[Tensor]:
    """As a graph computes it: rows that fill up have whatever keys, values and queries."""
    plan = pool.attention.plan(pool.shape(now))
    counts = [count for _, _, count in now]
    more = plan.rows - sum(counts)

    def filled(tensors: list[Tensor]) -> Tensor:
        nothing = torch.full((more, *tensors[0].shape[1:]), torch.nan, dtype=pool.dtype, device=DEVICE)
        return torch.cat((pool.packed(tensors, now), nothing))

    pool.attention.write(layer, filled(pool.keys), filled(pool.values), plan)
    return list(pool.attention.attend(layer, filled(pool.queries), plan, pool.sinks)[: sum(counts)].split(counts))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(cap: float) -> None:
    pool = TritonPool(Case(((20, 1), (0, 19)), group=2, head_dim=16), soft_cap=cap)
    pool.remember([(0, 0, 20)])
    now = [(0, 20, 1), (1, 0, 19)]
    for output, other in zip(pool.step(now), pool.as_reference(now), strict=True):
        torch.testing.assert_close(output, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("latent", [0, 32])
@pytest.mark.parametrize(("kv", "page_size"), [("int8", 16), ("fp8", 5), ("float16", 5)])
def test_pages_in_another_dtype(kv: str, page_size: int, latent: int) -> None:
    case = Case(((40, 1), (0, 17), (20, 3)), group=2, kv_heads=1, head_dim=48, page_size=page_size, latent=latent)
    pool = TritonPool(case if latent else replace(case, kv_heads=2), kv)
    now = [(0, 40, 1), (1, 0, 17), (2, 20, 3)]
    pool.remember([(0, 0, 40), (2, 0, 20)])
    for output, other in zip(pool.step(now), pool.as_reference(now), strict=True):
        torch.testing.assert_close(output, other, atol=5e-5, rtol=0)
    every = np.arange(pool.tables.max() + 1, dtype=np.int32)
    assert torch.equal(exported(pool.attention, every), exported(pool.reference, every)), "other bytes are stored"


@pytest.mark.parametrize("dtype", ["bfloat16", *(() if INTERPRETED else ("float16",)), "float32"])
def test_eight_bit_floats_below_the_least_with_all_bits_count(dtype: str) -> None:
    """Subnormal elements, beside one that is as large as there are."""
    case = Case(((40, 1), (0, 21)), group=4, kv_heads=1, head_dim=64, dtype=dtype)
    pool, now = TritonPool(case, "fp8"), [(0, 40, 1), (1, 0, 21)]
    made = torch.Generator().manual_seed(1)
    for tensors in (pool.keys, pool.values):
        for part in tensors:
            part.copy_(torch.randint(-7, 8, part.shape, generator=made) * 2.0**-9)
            part[..., 0] = 448.0
    for part in pool.queries:
        part.mul_(64.0)
        part[..., 0] = 0.0
    pool.remember([(0, 0, 40)])
    for output, other in zip(pool.step(now), pool.as_reference(now), strict=True):
        small = other[..., 1:].double().cpu().numpy() * 2.0**9
        assert small.std() > 0.3
        np.testing.assert_allclose(output[..., 1:].double().cpu().numpy() * 2.0**9, small, atol=0.1, rtol=0)


@pytest.mark.parametrize("windows", [(), (None, 9)])
def test_tokens_that_see_each_other_in_both_directions(windows: tuple[int | None, ...]) -> None:
    case = Case(((0, 30), (0, 25)), group=2, head_dim=16, windows=windows)
    pool, layer = TritonPool(case), LAYERS - 1
    pool.bidirectional[0] = 21
    first, other = pool.step([(0, 0, 24), (1, 0, 25)], layer)
    (again,), (rest,) = pool.step([(0, 7, 17)], layer), pool.step([(0, 24, 6)], layer)
    (causal,) = pool.step([(1, 0, 25)], layer)
    expected = plain_attention(
        *(part[0].double().cpu().numpy() for part in (pool.queries, pool.keys, pool.values)),
        0,
        windows[layer] if windows else None,
        21,
    )
    np.testing.assert_allclose(torch.cat((first, rest)).cpu().numpy(), expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(again.cpu().numpy(), expected[7:24], atol=2e-5, rtol=0)
    assert torch.equal(other, causal)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_bits_depend_on_the_sequence_alone(group: int) -> None:
    """Slices of one kind, see `model.gpu.tuning`, run alone on pages of 16, then among others, on other pages."""
    case = Case(((70, 3), (10, 1), (0, 18)), group, head_dim=32, page_size=7)
    together = TritonPool(case)
    alone = TritonPool(replace(case, lengths=case.lengths[:1], page_size=16, seed=1))
    alone.keys[0], alone.values[0], alone.queries[0] = together.keys[0], together.values[0], together.queries[0]
    for pool in (alone, together):
        pool.remember([(0, 0, 70)])
    together.remember([(1, 0, 10)])
    decoded = [alone.step([(0, 70 + i, 1)])[0] for i in range(3)]
    others: list[Slices] = [[(1, 10, 1)], [(2, 0, 18)], []]
    for i, (expected, beside) in enumerate(zip(decoded, others, strict=True)):
        assert torch.equal(together.step([*beside, (0, 70 + i, 1)])[-1], expected)


def test_bits_do_not_depend_on_how_a_prompt_is_cut() -> None:
    """Into slices of one kind, at any token. (NumPy's product, which the interpreter uses, gives a row other bits in
    another place of a matrix: there only whole pieces are cut off.)
    """
    case = Case(((0, 90), (3, 4)), group=2, head_dim=32)
    (expected,) = TritonPool(case).step([(0, 0, 39)])
    pool = TritonPool(case)
    at = 16 if INTERPRETED else 22
    pool.remember([(1, 0, 3)])
    _, first = pool.step([(1, 3, 4), (0, 0, at)])
    (second,) = pool.step([(0, at, 39 - at)])
    assert torch.equal(torch.cat((first, second)), expected)


@pytest.mark.parametrize("sink", [-math.inf, 3.0])
@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_any_number_of_parts_is_joined(count: int, sink: float) -> None:
    """Some of which have seen nothing: the first 16 that a program takes at once, and the last."""
    made = torch.Generator().manual_seed(count)
    tops, totals = 20 * torch.randn((count + 3, 2), generator=made), 1 + torch.rand((count + 3, 2), generator=made)
    parts = torch.randn((count + 3, 2, 24), generator=made)
    unseen = torch.zeros(count + 3, dtype=torch.bool)
    unseen[3:19] = unseen[-1] = count > 17
    tops[unseen], totals[unseen], parts[unseen] = -torch.inf, 0.0, 0.0
    out = torch.full((5, 2, 24), torch.nan, device=DEVICE)
    sums, joins = torch.stack((tops, totals), -1), torch.tensor([[4, 3, count, 0]], dtype=torch.int32)
    given = [x.to(DEVICE) for x in (parts, sums, torch.full((2,), sink), joins)]
    join_parts[(1, 2)](out, *given, HEAD_DIM=24, PADDED_DIM=32, PARTS_AT_ONCE=16)
    highest = tops[3:].double().amax(0).clamp(min=sink)
    weights = torch.exp2(tops[3:].double() - highest)[..., None]
    whole = (weights[..., 0] * totals[3:]).sum(0) + torch.exp2(sink - highest)
    expected = (weights * parts[3:]).sum(0) / whole[:, None]
    torch.testing.assert_close(out[4].cpu().double(), expected, atol=1e-5, rtol=1e-5)
    assert out[:4].isnan().all()


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_every_eight_bit_number_and_what_is_between_two_is_stored_as_the_reference_does(kv: str) -> None:
    layout = KVLayout.uniform(((0,),), 2, 256, 1, 16, 4)
    if kv == "fp8":
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0)
    else:
        numbers = torch.arange(-127.0, 129.0).clamp(max=127)
    ordered = numbers.sort().values
    between = torch.cat(((ordered[1:] + ordered[:-1]) / 2, ordered[-1:]))
    between[0] = ordered[0]
    edge = torch.full((256,), torch.inf)
    edge[1:] = between[1:]
    rows = torch.stack((numbers, between, between * 3.7e-5, torch.zeros(256), between * (1 + 1e-6), numbers * 1e30))
    keys = rows.view(3, 2, 256).to(DEVICE)
    broken = torch.stack((edge, edge.neg(), edge.nan_to_num(torch.nan, torch.nan), between, between, edge)).view(
        3, 2, 256
    )
    slots = np.array([[3, 17, 31]])
    shape = StepShape(
        np.array([[0, 0, 3]], np.int32), np.arange(3), slots, np.zeros((1, 1, 1), np.int32), np.zeros(1, int)
    )
    one = TritonAttention(layout, 2, 2, kv, DEVICE, "float32")
    other = ReferenceAttention(layout, 2, 2, kv, DEVICE)
    for attention in (one, other):
        attention.write(0, keys, keys.flip(0), attention.plan(shape))
    pages = np.arange(2, dtype=np.int32)
    assert torch.equal(exported(one, pages), exported(other, pages))
    for attention in (one, other):
        attention.write(0, keys, broken.to(DEVICE), attention.plan(shape))
    moved = ReferenceAttention(layout, 2, 2, kv, DEVICE)
    imported(moved, pages, exported(one, pages))
    found, expected = (pool.read(0, pool.places(0, slots[0]))[1] for pool in (moved.pool, other.pool))
    finite = expected.isfinite().all(-1)
    assert torch.equal(found.isfinite().all(-1), finite)
    assert torch.equal(found[finite], expected[finite])
    assert finite.tolist() == [[False, False, True], [False, True, False]]


@pytest.mark.parametrize("latent", [0, 32])
def test_pages_move_between_back_ends(latent: int) -> None:
    case = Case((), 4, kv_heads=1 if latent else 2, head_dim=48, page_size=7, latent=latent)
    layout = case.layout
    one = TritonAttention(layout, 5, 4, "float32", DEVICE, "float32")
    other = ReferenceAttention(layout, 5, 4, "float32", DEVICE)
    slots = np.random.default_rng(0).permutation(35)
    shape = StepShape(
        np.array([[0, 0, 35]], np.int32), np.arange(35), slots[None], np.zeros((1, 1, 9), np.int32), np.zeros(1, int)
    )
    plan = one.plan(shape)
    for layer in range(2):
        keys, values = torch.randn((2, 35, case.kv_heads, 48), device=DEVICE)
        one.write(layer, keys, keys[..., :latent] if latent else values, plan)
    pages = np.array([3, 1], np.int32)
    content = exported(one, pages)
    imported(other, [0, 2], content)
    assert torch.equal(exported(other, [0, 2]), content)
    one.copy(np.array([[3, 4]], np.int32))
    one.poison(pages)
    assert exported(one, pages).view(torch.float32).isnan().all()
    assert torch.equal(exported(one, [4]), content[:1])
