"""The bench's sections on speed run through, on small sizes."""

import pytest
import torch

from bench.on_gpu import attention_speed, ceilings, mixtures, parts_speed
from bench.on_gpu.bench import Bench, Ceilings
from bench.on_gpu.budget import Budget
from bench.on_gpu.report import ATTENTION_GOAL, Report
from bench.on_gpu.sizes import HOST
from bench.on_gpu.timing import HostTimer
from model.recurrent import DeltaShape
from tests.model.gpu.kernels.device import DEVICE


@pytest.fixture
def bench() -> Bench:
    return Bench(DEVICE, HOST, Budget(1000.0), Report(), HostTimer(), Ceilings(1e9, 1e9, 1e12))


def test_attention(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("HEADS", 4), ("KV_HEADS", 2), ("DIM", 32), ("MEGABYTE", 1024), ("ROTATED", 128 * 1024), ("GOAL_FROM", 64),
        ("DECODES", ((8, 1), (64, 4))), ("FLEX_DECODES", frozenset([(64, 4)])), ("PREFILLS", (48,)),
        ("SHARED", ((32, 9),)), ("OWN", 16),
    ):  # fmt: skip
        monkeypatch.setattr(attention_speed, name, value)
    monkeypatch.setattr(attention_speed, "flex_decode", lambda queries, stores: lambda: 1 / 0)
    monkeypatch.setattr(attention_speed, "flex_prefill", lambda queries, stores: lambda: None)
    attention_speed.attention_speed(bench)
    plain, eight, shared, prefill = bench.report.tables
    assert [row["case"] for row in plain.rows] == ["8 MiB: 1 x 32", "64 MiB: 4 x 64"]
    assert [row["case"] for row in eight.rows] == ["8 MiB: 1 x 56", "64 MiB: 4 x 113"]
    for row in plain.rows:
        assert row["GB/s"] == pytest.approx(float(row["case"].split()[0]) * 1024 / row["ms"] / 1e6)
        assert row["of copy"] == row["GB/s"]
        assert row["times SDPA"] == pytest.approx(row["SDPA"] / row["ms"])
    assert "flex failed on 64 MiB: 4 x 64: ZeroDivisionError: division by zero" in plain.notes
    (row,) = shared.rows
    assert row["case"] == "32 tokens, 9 sequences"
    assert row["times alone"] == pytest.approx(row["alone"] / row["ms"])
    (row,) = prefill.rows
    assert row["TFLOP/s"] == pytest.approx(4 * 4 * 32 * 48 * 49 / 2 / row["ms"] / 1e9)
    assert set(row) == {"case", "ms", "spread", "SDPA", "flex", "times SDPA", "TFLOP/s", "of product"}
    goal = bench.report.goals[ATTENTION_GOAL]
    assert goal.found == min(table.rows[1]["of copy"] for table in (plain, eight))
    assert bench.report.failures == []


def test_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_speed.Decodes.of(8, 16, None)
    assert (case.context, case.layers, case.bytes) == (128, 64, 8 * 2**20)
    assert attention_speed.Decodes.of(1024, 8, None).layers == 1
    seen: list[int] = []

    class Attention:
        def plan(self, shape: object) -> None: ...

        def attend(self, layer: int, queries: object, plan: object) -> None:
            seen.append(layer)

    book = attention_speed.Book.of([4], 16)
    work = attention_speed.ours(Attention(), book, [(0, 3, 1)], 3, DEVICE)  # type: ignore[arg-type]
    for _ in range(5):
        work()
    assert seen == [0, 1, 2, 0, 1]


def test_other_kernels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("HIDDEN", 64), ("INNER", 96), ("VOCABULARY", 500), ("ROWS", 3), ("TOKENS", 20), ("HEADS", 4), ("KV_HEADS", 2),
        ("DIM", 32), ("DELTA", DeltaShape(1, 2, 16, 8, 4)), ("PROMPT", 10),
    ):  # fmt: skip
        monkeypatch.setattr(parts_speed, name, value)
    parts_speed.parts_speed(bench)
    (table,) = bench.report.tables
    assert bench.report.failures == []
    megabytes = {row["kernel"]: row["MB"] * 1e6 for row in table.rows}
    assert megabytes == pytest.approx({
        "KV write, bfloat16": 4 * 20 * 64 * 2, "KV write, fp8": 2 * 20 * 64 * 2 + 2 * 20 * (64 + 2 * 4),
        "norm": 2 * 20 * 64 * 2, "norm of a sum": 4 * 20 * 64 * 2, "rotation of queries and keys": 2 * 20 * 6 * 32 * 2,
        "gate": 3 * 20 * 96 * 2, "sampler: summary": 3 * 500 * 4, "sampler: draw": 3 * 500 * 4,
        "sampler: top_k 20, top_p 0.9": 3 * 500 * 4, "sampler: top_p 0.9": 3 * 500 * 4,
        "sampler: top_p 0.9, flat": 3 * 500 * 4, "sampler: top_k 20, top_p 0.9, one row": 500 * 4,
        "torch's sort: top_k 20, top_p 0.9, 32 rows": 32 * 500 * 4,
        "short convolution": 2 * 20 * 48 * 4, "delta rule, prefill": 20 * 4 * (16 + 16 + 2 * 16),
        "delta rule, decode": 2 * 3 * 4 * 2 * 16 * 8,
    })  # fmt: skip


def test_mixtures(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "SHAPES", {"small": mixtures.MixtureShape(4, 2, 32, 16)})
    for name, value in (("TOKENS", (1, 6)), ("ROTATED", 2**14), ("ROUNDS", 1)):
        monkeypatch.setattr(mixtures, name, value)
    mixtures.mixtures(bench)
    (table,) = bench.report.tables
    assert bench.report.failures == []
    assert [row["mixture, tokens"] for row in table.rows] == ["small, 1", "small, 6"]
    assert table.rows[0]["experts"] == 2
    assert all(row["of the floor"] > 0 for row in table.rows)


def test_a_kernel_reads_all() -> None:
    numbers = torch.arange(2 * 4 * 8, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    ceilings.read_blocks[(2,)](numbers, out, BLOCK=8, EACH=4)
    assert out.tolist() == [sum(range(32)), sum(range(32, 64))]
    ceilings.nothing[(1,)](out)
    assert out.tolist() == [1, sum(range(32, 64))]
