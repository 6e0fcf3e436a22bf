"""Long slices by FlashInfer beside the others by Triton's kernels, against the reference. A stub has FlashInfer's
place: it checks what it is given, and computes it by torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend
from model.backend import NoKernels
from model.gpu.attention_backend import TritonAttention
from model.gpu.flashinfer import FlashInferPrompts, PagedPrefill, why_not
from model.reference.attention_backend import ReferenceAttention
from tests.model.gpu.kernels.device import DEVICE
from tests.model.gpu.kernels.flashinfer_stub import StubPrefill
from tests.model.gpu.kernels.test_attention import SMALL, TritonPool
from tests.model.test_attention import LAYERS, TOLERANCE, Case

LONG = 20


def stub(room: Tensor, order: str, kernels: str) -> PagedPrefill:
    return StubPrefill(room, order, backend=kernels)


@pytest.fixture(autouse=True)
def few_tokens_are_long(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("model.gpu.flashinfer.LONG", LONG)
    monkeypatch.setattr("model.gpu.pieces.FILLING", 40)
    StubPrefill.made.clear()
    yield
    StubPrefill.made.clear()


class FlashInferPool(TritonPool):
    """make: makes what stands for FlashInfer."""

    make: Callable[..., Any] = staticmethod(stub)

    def _backend(self, layout: KVLayout, pages: int) -> AttentionBackend:
        dtype = self.case.dtype
        prompts = FlashInferPrompts(layout, self.heads, dtype, DEVICE, None, self.soft_cap, self.make, "0")
        made = TritonAttention(
            layout, pages + 1, self.heads, self.kv, DEVICE, dtype, soft_cap=self.soft_cap, tuning=SMALL, prompts=prompts
        )
        made.prepare()
        self.reference = ReferenceAttention(layout, pages, self.heads, self.kv, DEVICE, soft_cap=self.soft_cap)
        self.reference.poison(np.arange(pages, dtype=np.int32))
        return made


HALF = "float16"
LENGTHS = ((0, 45), (15, 1), (33, 23), (70, 1), (8, 20), (3, 19))
CASES = [
    (Case(LENGTHS, group=3, head_dim=64, dtype=HALF), None),
    (Case(LENGTHS[1:], group=1, head_dim=128, page_size=1, kv_heads=3, dtype=HALF, windows=(None, 20)), None),
    (Case(LENGTHS, group=2, head_dim=64, page_size=7, dtype=HALF, windows=(1, 33)), None),
    (Case(((40, 30),), group=20, kv_heads=1, head_dim=64, page_size=32, dtype=HALF), None),
    (Case(LENGTHS, group=2, head_dim=64, dtype=HALF, windows=(None, 20), sinks=True), None),
    (Case(LENGTHS, group=2, head_dim=64, page_size=7, dtype=HALF, windows=(None, 20), chunked=True), None),
    (Case(LENGTHS[2:], group=2, head_dim=64, dtype=HALF), 5.0),
]


@pytest.mark.parametrize(("case", "cap"), CASES)
def test_equals_the_reference(case: Case, cap: float | None) -> None:
    pool = FlashInferPool(case, soft_cap=cap)
    now = [(i, before, count) for i, (before, count) in enumerate(case.lengths)]
    made = len(StubPrefill.made)
    assert made == (1 if case.chunked else len(case.layout.groups)), "layers with chunks are the kernels' own"
    before = [one.runs for one in StubPrefill.made]
    for layer in range(LAYERS):
        pool.remember([(i, 0, seen) for i, seen, _ in now if seen], layer)
    if case.windows:
        for i, seen, _ in now:
            pool.slide(i, seen)
    for layer in range(LAYERS):
        for found, expected in zip(pool.step(now, layer), pool.as_reference(now, layer), strict=True):
            torch.testing.assert_close(found, expected, atol=2 * TOLERANCE[case.dtype], rtol=0)
    ran = sum(one.runs for one in StubPrefill.made) - sum(before)
    assert ran == (1 if case.chunked else LAYERS)


def test_each_kind_of_slice_has_its_kernels() -> None:
    """A step without long slices may be a graph; a long slice keeps no other from its own kernels."""
    case = Case(LENGTHS, group=2, head_dim=64, dtype=HALF)
    pool = FlashInferPool(case)
    pool.attention.fix((2, 4, 8), (64, 256), 128)
    short, every = [(1, 15, 1), (5, 3, 19)], [(i, before, count) for i, (before, count) in enumerate(LENGTHS)]
    plan = pool.attention.plan(pool.shape(short))
    assert (plan.rows, plan.prompts) == (64, None)
    plan = pool.attention.plan(pool.shape(every))
    assert plan.rows == 0
    assert plan.prompts.taken.tolist() == [True, False, True, False, True, False]
    tokens = [one for part in plan.groups[0].passes for launch in part.launches for one in _tokens(plan, launch)]
    assert sorted(set(tokens)) == [45, 69, *range(90, 109)], "the kernels compute the other tokens"
    one = pool.attention.plan(pool.shape(every[:1])).prompts
    assert one.tokens == slice(0, 45)


def _tokens(plan: Any, launch: Any) -> Iterator[int]:
    """Yields the tokens of a launch's pieces."""
    count, pieces, _, order = plan.packed[launch.header : launch.header + 4].tolist()
    for piece in plan.packed[pieces : pieces + 8 * count].view(count, 8).tolist():
        yield from plan.packed[order + piece[1] : order + piece[1] + piece[2]].tolist()


def test_tokens_that_see_each_other_in_both_directions_are_the_kernels() -> None:
    pool = FlashInferPool(Case(((0, 45), (0, 30)), group=2, head_dim=64, dtype=HALF))
    pool.bidirectional[0] = 21
    now = [(0, 0, 45), (1, 0, 30)]
    assert pool.attention.plan(pool.shape(now)).prompts.taken.tolist() == [False, True]
    for found, expected in zip(pool.step(now), pool.as_reference(now), strict=True):
        torch.testing.assert_close(found, expected, atol=2 * TOLERANCE[HALF], rtol=0)
    assert pool.attention.plan(pool.shape([(0, 21, 24)])).prompts.taken.tolist() == [True]


def test_bits_of_others_stay() -> None:
    """Decodes and short slices beside a long one have the bits that they have without FlashInfer."""
    case = Case(LENGTHS, group=2, head_dim=64, dtype=HALF)
    with_it, without = FlashInferPool(case), TritonPool(case)
    for i, queries in enumerate(with_it.queries):
        without.queries[i], without.keys[i], without.values[i] = queries, with_it.keys[i], with_it.values[i]
    now = [(i, before, count) for i, (before, count) in enumerate(case.lengths)]
    for pool in (with_it, without):
        pool.remember([(i, 0, before) for i, before, _ in now if before])
    for (_, _, count), found, expected in zip(now, with_it.step(now), without.step(now), strict=True):
        assert count >= LONG or torch.equal(found, expected)


class Faulty(StubPrefill):
    """fault: what is wrong with it."""

    fault = ""

    def plan(self, *arguments: Any, **options: Any) -> None:
        if self.fault == "window":
            options["window_left"] += 1
        if self.fault == "scale":
            options["sm_scale"] *= 1.1
        super().plan(*arguments, **options)

    def run(self, *arguments: Any, **options: Any) -> Any:
        found = super().run(*arguments, **options)
        return (found[0], found[1] * np.log(2)) if self.fault == "base" and options["return_lse"] else found


@pytest.mark.parametrize("fault", ["", "window", "scale", "base"])
def test_a_wrong_call_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    monkeypatch.setattr(FlashInferPool, "make", staticmethod(lambda *given: Faulty(*given)))
    case = Case(((30, 40),), group=2, head_dim=64, dtype=HALF, windows=(None, 20), sinks=True)
    pool, layer = FlashInferPool(case), LAYERS - 1
    pool.remember([(0, 0, 30)], layer)
    (found,), (expected,) = pool.step([(0, 30, 40)], layer), pool.as_reference([(0, 30, 40)], layer)
    off = (found - expected).abs().max().item()
    assert (off > 4 * TOLERANCE[HALF]) == bool(fault)


@pytest.mark.parametrize(
    ("changes", "dtypes", "reason"),
    [
        ({}, ("bfloat16", "bfloat16"), None),
        ({"windows": (None, 20)}, ("float16", "float16"), None),
        ({"windows": (None, 20), "chunked": True}, ("float16", "float16"), None),
        ({"head_dim": 80}, ("float16", "float16"), "64, 128, 256 elements, and no layer has such"),
        ({"kv_heads": 1, "latent": 32}, ("float16", "float16"), "no layer has such"),
        ({"windows": (20, 30), "chunked": True}, ("float16", "float16"), "causal heads"),
        ({}, ("float32", "float32"), "alike in float16 or bfloat16, not float32 and float32"),
        ({}, ("bfloat16", "fp8"), "not bfloat16 and fp8"),
    ],
)
def test_what_it_cannot_have_is_named(changes: dict[str, Any], dtypes: tuple[str, str], reason: str | None) -> None:
    case = replace(Case((), group=2, head_dim=64), **changes)
    found = why_not(case.layout, *dtypes)
    assert (found is None) == (reason is None)
    assert reason is None or (found is not None and reason in found)


def test_a_compiler_that_fails_is_told() -> None:
    def broken(*_: object) -> PagedPrefill:
        class Broken(StubPrefill):
            def run(self, *_: Any, **__: Any) -> Any:
                raise RuntimeError("Could not find nvcc")

        return Broken(torch.empty(128 * 2**20, dtype=torch.uint8, device=DEVICE), "HND", "fa2")

    layout = Case((), group=1, head_dim=64, dtype=HALF).layout
    prompts = FlashInferPrompts(layout, 2, HALF, DEVICE, None, None, broken, "0")
    made = TritonAttention(layout, 1, 2, HALF, DEVICE, HALF, tuning=SMALL, prompts=prompts)
    with pytest.raises(NoKernels, match="FlashInfer cannot compute: RuntimeError: Could not find nvcc"):
        made.prepare()
