"""The bench's sections on weights in 4 and 8 bits, draws and moves of pages run through, and find what is wrong."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.on_gpu import draws_speed, page_moves
from bench.on_gpu.ahead import run_job
from bench.on_gpu.bench import Bench, Ceilings
from bench.on_gpu.budget import Budget
from bench.on_gpu.drawn_weights import DENSE, OF_EXPERTS
from bench.on_gpu.draws_speed import CONTROLS, DrawSizes
from bench.on_gpu.mixtures import MixtureShape
from bench.on_gpu.page_moves import KVS, MoveSizes
from bench.on_gpu.quantized import DenseSizes, compile_dense, quantized
from bench.on_gpu.quantized_experts import ExpertSizes, compile_experts
from bench.on_gpu.report import Report
from bench.on_gpu.sizes import HOST
from bench.on_gpu.timing import HostTimer
from model.gpu.draws import start_draws
from model.gpu.expert_weights import GroupExperts
from model.gpu.group_linear import MOST_ROWS, GroupProduct
from model.kv_pool import ALL_ONES
from tests.model.gpu.kernels.device import DEVICE, compute_in

DTYPE = torch.float16 if compute_in("bfloat16") == "float32" else torch.bfloat16
EXPERTS = ExpertSizes(MixtureShape(4, 2, 64, 64), tuple(OF_EXPERTS), (1, 6), 2**14, 1, DTYPE)
SIZES = DenseSizes({"small": (256, 64)}, (2, MOST_ROWS + 3), 2**14, 1, DTYPE, tuple(DENSE), EXPERTS)
DRAWS, MOVES = DrawSizes(100, (2,), 12, 5, 1), MoveSizes(2, 3, 1)


def bench_of(seconds: float = 1000.0) -> Bench:
    return Bench(DEVICE, HOST, Budget(seconds), Report(), HostTimer(), Ceilings(1e9, 1e9, 1e12))


def test_weights() -> None:
    bench = bench_of()
    quantized(bench, SIZES)
    dense, experts = bench.report.tables
    assert bench.report.failures == []
    assert [row["kind, rows"] for row in dense.rows] == [f"{kind}, {rows}" for rows in SIZES.rows for kind in DENSE]
    stored = {row["kind, rows"].rsplit(", ", 1)[0]: row["MB"] * 1e6 for row in dense.rows}
    numbers = 256 * 64
    assert stored == {
        "int8": numbers + 4 * 64, "int4, groups of 32": numbers / 2 + 2 * 2 * 8 * 64,
        "GPTQ, groups of 128": numbers / 2 + 2 * 2 * 64, "AWQ, groups of 128": numbers / 2 + (2 + 4) * 2 * 64,
        "fp8, blocks of 128": numbers + 4 * 2 * 64, "fp8 rows and weights": numbers + 4 * 64,
    }  # fmt: skip
    for row in dense.rows:
        count = int(row["kind, rows"].rsplit(", ", 1)[1])
        moved = row["MB"] * 1e6 + 2 * count * (256 + 64)
        assert row["of the floor"] == pytest.approx(moved / 1e9 / (row["ms"] / 1e3))
        assert row["times torch"] == pytest.approx(row["torch ms"] / row["ms"])
    assert [row["kind, tokens"] for row in experts.rows] == [f"{kind}, {n}" for n in (1, 6) for kind in OF_EXPERTS]
    assert {row["experts"] for row in experts.rows[: len(OF_EXPERTS)]} == {2.0}
    assert {row["verdict"] for row in (*dense.rows, *experts.rows)} == {"right"}


Fault = Callable[[pytest.MonkeyPatch], None]


def a_product_is_wrong(patch: pytest.MonkeyPatch) -> None:
    multiply = GroupProduct.__call__

    def changed(self: GroupProduct, x: Tensor, batch: None = None) -> Tensor:
        return multiply(self, x, batch) * 1.03

    patch.setattr(GroupProduct, "__call__", changed)


def experts_are_wrong(patch: pytest.MonkeyPatch) -> None:
    multiply = GroupExperts.__call__

    def changed(self: GroupExperts, *given: object) -> Tensor:
        return multiply(self, *given) * 1.03  # type: ignore[arg-type]

    patch.setattr(GroupExperts, "__call__", changed)


@pytest.mark.parametrize(("fault", "table"), [(a_product_is_wrong, 0), (experts_are_wrong, 1)])
def test_wrong_products_are_told(monkeypatch: pytest.MonkeyPatch, fault: Fault, table: int) -> None:
    fault(monkeypatch)
    bench, one = bench_of(), ("int8",)
    quantized(bench, replace(SIZES, rows=(2,), kinds=one, experts=replace(EXPERTS, kinds=one, tokens=(6,))))
    verdicts = [[row["verdict"] for row in found.rows] for found in bench.report.tables]
    assert verdicts[table] == ["WRONG"]
    assert verdicts[1 - table] == ["right"]


def test_one_kind_without_a_kernel_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.on_gpu.drawn_weights.can_multiply", lambda *_: False)
    bench = bench_of()
    kinds = "fp8 rows and weights", "int8"
    quantized(bench, replace(SIZES, rows=(2,), kinds=kinds, experts=replace(EXPERTS, kinds=(), tokens=())))
    failed, right = bench.report.tables[0].rows
    assert failed["failed"] == "RuntimeError: the device does not multiply float8"
    assert right["verdict"] == "right"


@pytest.mark.skipif(torch.cuda.is_available(), reason="jobs run on the GPU")
def test_a_job_that_cannot_run_is_told() -> None:
    for function, sizes in ((compile_dense, SIZES), (compile_experts, EXPERTS)):
        assert run_job((function, sizes, "int8")) != ""


def test_without_time_all_is_named() -> None:
    bench = bench_of(1.0)
    quantized(bench, replace(SIZES, kinds=(), experts=replace(EXPERTS, kinds=())))
    draws_speed.draws_speed(bench, DRAWS)
    page_moves.page_moves(bench, MOVES)
    assert all("skipped" in row for table in bench.report.tables for row in table.rows)
    assert [len(table.rows) for table in bench.report.tables] == [2, 2, len(CONTROLS), *[1] * len(KVS)]


def test_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_speed, "CALLS", 1)
    bench = bench_of()
    draws_speed.draws_speed(bench, DRAWS)
    (table,) = bench.report.tables
    assert [row["controls, rows"] for row in table.rows] == [f"{name}, 2" for name in CONTROLS]
    assert [row["verdict"] for row in table.rows] == ["right"] * len(table.rows)
    assert all(row["of read"] > 0 and row["host ms"] > 0 for row in table.rows)


def test_other_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_speed, "start_draws", lambda logits, *rest: start_draws(logits.flip(1), *rest))
    monkeypatch.setattr(draws_speed, "CONTROLS", {"greedy": CONTROLS["greedy"]})
    bench = bench_of()
    draws_speed.draws_speed(bench, replace(DRAWS, rows=(3,)))
    assert [row["verdict"] for row in bench.report.tables[0].rows] == ["WRONG: 3 tokens are others"]


def test_moves() -> None:
    bench = bench_of()
    page_moves.page_moves(bench, MOVES)
    assert bench.report.failures == []
    assert len(bench.report.tables) == 2 * len(KVS)
    for on_device, host in zip(bench.report.tables[::2], bench.report.tables[1::2], strict=True):
        assert [(row["move"], row["verdict"]) for row in on_device.rows] == [
            ("copy", "right"), ("export", ""), ("import", "right"),
        ]  # fmt: skip
        told = {row["move"]: row.get("verdict") for row in host.rows}
        assert told["load, pageable"] == "right"
        assert {"save, pageable", "checksums, pageable", "one copy to the host, pageable"} < told.keys()
    sizes = [table.rows[0]["MB"] * 1e6 for table in bench.report.tables[::2]]
    assert sizes == [3 * 2 * 2 * 8 * 16 * 128 * 2, 3 * 2 * 2 * 8 * 16 * (128 + 4)]


def test_a_page_that_is_not_moved_is_told() -> None:
    pages = page_moves.Pages.of(DEVICE, MOVES, None)
    pages.forget()
    assert (pages.content(pages.others) == ALL_ONES).all()
    assert pages.unlike() == 3
    pages.attention.copy(np.stack((pages.first, pages.others), 1)[:2])
    assert pages.unlike() == 1
    assert page_moves.verdict(1) == "WRONG: 1 pages are others"
