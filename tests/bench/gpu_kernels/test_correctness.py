"""The bench's section on correctness finds that kernels are right, and finds what is not."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.on_gpu import check_attention, check_parts
from bench.on_gpu.bench import Bench
from bench.on_gpu.budget import Budget
from bench.on_gpu.check_attention import AttentionCase, Verdict, check
from bench.on_gpu.correctness import correctness
from bench.on_gpu.report import Report
from bench.on_gpu.sizes import HOST
from bench.on_gpu.timing import HostTimer
from model.gpu.attention_backend import TritonAttention
from model.gpu.parts import KernelNorm
from tests.model.gpu.kernels.device import DEVICE
from tests.support.pages import exported, imported

LENGTHS = ((70, 1), (16, 1), (0, 17), (33, 5))
CASES = [
    AttentionCase("float32", 3, 64, 7),
    AttentionCase("float32", 4, 32, kv="int8"),
    AttentionCase("float32", 1, 80, 7, kv="fp8", window=20),
    AttentionCase("float16", 8, 32, window=20, cap=5.0),
    AttentionCase("float32", 3, 48, 7, kv_heads=1, latent=32),
    AttentionCase("float32", 3, 48, kv="int8", kv_heads=1, latent=32),
]


def bench_of(seconds: float) -> Bench:
    return Bench(DEVICE, HOST, Budget(seconds), Report(), HostTimer())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_right(case: AttentionCase) -> None:
    found = check(case, LENGTHS, DEVICE)
    assert found.problems == ()
    assert set(found.parts) == {"decode", "prefill"}
    assert all(0.0 < error.most <= found.allowed.most for error in found.parts.values())


def test_sequences_may_share_pages() -> None:
    case = AttentionCase("float32", 2, 32, shared=32)
    lengths = (*LENGTHS, (40, 1))
    pool = check_attention.Pool(case, lengths, DEVICE)
    first, second = (pool.book.table[pool.book.rows[i]] for i in (0, 3))
    assert first[:2].tolist() == second[:2].tolist()
    assert first[2] != second[2]
    assert torch.equal(pool.keys[4][:32], pool.keys[0][:32])
    assert check(case, lengths, DEVICE).problems == ()


def test_many_may_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the shortest chunk, so that it is read once for them all."""
    case = AttentionCase("float32", 2, 32, shared=320, lengths=tuple((330 + i, 1) for i in range(8)))
    pool = check_attention.Pool(case, case.lengths, DEVICE)
    assert pool.attention.plan(pool.book.shape([(i, before, 1) for i, (before, _) in enumerate(case.lengths)])).shares
    assert check(case, case.lengths, DEVICE).problems == ()


def test_all_of_it_is_told() -> None:
    bench = bench_of(1000.0)
    correctness(bench, CASES[:1], LENGTHS, ("float32",), 5000)
    parts, attention = bench.report.tables
    assert [row["verdict"] for row in attention.rows] == ["right"]
    assert {row["verdict"] for row in parts.rows} == {"right"}
    assert len(parts.rows) == 23
    assert bench.report.failures == []


def test_cases_for_which_there_is_no_time_are_named() -> None:
    bench = bench_of(10.0)
    correctness(bench, CASES, LENGTHS, (), 64)
    (_, attention) = bench.report.tables
    assert [row["case"] for row in attention.rows] == [case.name for case in CASES]
    assert all("skipped" in row for row in attention.rows)


Fault = Callable[[pytest.MonkeyPatch], None]


def a_result_is_not_written(patch: pytest.MonkeyPatch) -> None:
    attend = TritonAttention.attend

    def changed(self: TritonAttention, layer: int, queries: Tensor, plan: object) -> Tensor:
        out = attend(self, layer, queries, plan)  # type: ignore[arg-type]
        out[-1, 0, 3] = torch.empty(1, dtype=out.dtype, device=out.device)[0]
        return out

    patch.setattr(TritonAttention, "attend", changed)


def another_page_is_read(patch: pytest.MonkeyPatch) -> None:
    plan = TritonAttention.plan

    def changed(self: TritonAttention, shape: object) -> object:
        return plan(self, replace(shape, tables=shape.tables[:, :, ::-1]))  # type: ignore[type-var, attr-defined]

    patch.setattr(TritonAttention, "plan", changed)


def bits_depend_on_the_batch(patch: pytest.MonkeyPatch) -> None:
    attend = TritonAttention.attend

    def changed(self: TritonAttention, layer: int, queries: Tensor, plan: object) -> Tensor:
        return attend(self, layer, queries, plan) * (1 + 1e-6 * (len(queries) == 1))  # type: ignore[arg-type]

    patch.setattr(TritonAttention, "attend", changed)


def one_more_page_is_written(patch: pytest.MonkeyPatch) -> None:
    write = TritonAttention.write

    def changed(self: TritonAttention, layer: int, keys: Tensor, values: Tensor, plan: object) -> None:
        write(self, layer, keys, values, plan)  # type: ignore[arg-type]
        every = np.arange(self.pool.count, dtype=np.int32)
        content = exported(self, every)
        content[:, :4] = 0
        imported(self, every, content)

    patch.setattr(TritonAttention, "write", changed)


def the_window_is_one_token_too_long(patch: pytest.MonkeyPatch) -> None:
    made = check_attention.truth.attention
    patch.setattr(check_attention.truth, "attention", lambda q, k, v, start, window, cap: made(q, k, v, start, 19, cap))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (a_result_is_not_written, "prefill: too far from float64"),
        (another_page_is_read, "too far from float64"),
        (bits_depend_on_the_batch, "has other bits in a batch"),
        (one_more_page_is_written, "pages hold other numbers"),
        (one_more_page_is_written, "something was written outside the sequences' slots"),
        (the_window_is_one_token_too_long, "too far from float64"),
    ],
    ids=lambda value: getattr(value, "__name__", "found"),
)
def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, fault: Fault, told: str) -> None:
    fault(monkeypatch)
    found: Verdict = check(AttentionCase("float32", 2, 32, window=20), LENGTHS, DEVICE)
    assert any(told in problem for problem in found.problems), found.problems


def test_a_wrong_norm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = KernelNorm.__call__
    monkeypatch.setattr(KernelNorm, "__call__", lambda self, x: norm(self, x) * 1.001)
    bench = bench_of(1000.0)
    correctness(bench, (), LENGTHS, ("float32",), 64)
    wrong = [row["kernel"] for row in bench.report.tables[0].rows if row["verdict"] == "WRONG"]
    assert wrong == ["norm of 576, float32", "norm of 4096, float32", "norm of heads, float32"]
    assert len(bench.report.failures) == 3


def test_another_draw_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = check_parts.GpuOps.draw
    monkeypatch.setattr(check_parts.GpuOps, "draw", lambda self, logits, draws: draw(self, logits.flip(1), draws))
    assert check_parts.draws(DEVICE, 500, 1.0, 0.0).most > check_parts.ROUNDED
