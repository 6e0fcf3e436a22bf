"""The ledger of steps on a GPU: its arithmetic beside plain statements, and its page."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from bench.gpu_ledger import code, costs, host, page, published
from bench.gpu_ledger.__main__ import PAGE
from bench.gpu_ledger.cases import H100, H200, LEDGER, LLAMA_8B, LLAMA_70B, QWEN_30B, REGIMES, LedgerModel, Regime
from bench.gpu_ledger.costs import MIXTURE, Work
from bench.gpu_ledger.prediction import device_seconds, floor_of, held_bytes, launching_seconds
from bench.gpu_ledger.recording import Launch, recorded
from bench.gpu_ledger.steps import LedgerEngine, LedgerStep, RecordedEngine, step_of
from bench.gpu_ledger.tables import tables
from bench.on_gpu.models import Costs
from model.attention.backend import StepShape

LAYERS, HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, DIM = 32, 4096, 14_336, 128_256, 32, 8, 128
MATRICES = HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * INNER
KV_TOKEN = 2 * 2 * LAYERS * KV_HEADS * DIM
DECODE, PROMPT = Regime(64, 1024, 1), Regime(1, 0, 2048)


def test_an_8b_model_has_the_bytes_that_it_is_published_with() -> None:
    assert KV_TOKEN == 131_072
    held = held_bytes(LLAMA_8B, Regime(1, 0, 1))
    assert held / 1e9 == pytest.approx(16.06, abs=0.005)


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_a_step_of_a_dense_model_reads_its_weights_and_keys_once(regime: Regime) -> None:
    step = step_of(LLAMA_8B, regime)
    norms = 2 * LAYERS + 1
    assert step.total(lambda work: work.weights) == 2 * (LAYERS * MATRICES + VOCABULARY * HIDDEN + norms * HIDDEN)
    assert step.total(lambda work: work.kv) == KV_TOKEN * (regime.keys + regime.tokens), "read, and written"
    seen = regime.now * regime.before + regime.now * (regime.now + 1) // 2
    products = 2 * (regime.tokens * LAYERS * MATRICES + regime.sequences * VOCABULARY * HIDDEN)
    attention = 4 * LAYERS * HEADS * DIM * regime.sequences * seen
    assert step.total(lambda work: work.operations) == products + attention


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_a_mixture_costs_what_the_bench_on_a_gpu_counts(regime: Regime) -> None:
    step, plain = step_of(QWEN_30B, regime), Costs.of(dict(QWEN_30B.fields))
    read = step.total(lambda work: work.weights + work.kv) - regime.tokens * plain.token
    assert read == pytest.approx(plain.step_bytes(regime.keys, regime.tokens), rel=2e-4), "but for norms"
    operations = (
        plain.decode_operations(regime.sequences, regime.keys)
        if regime.is_decode
        else plain.prefill_operations(regime.tokens)
    )
    assert step.total(lambda work: work.operations) == pytest.approx(operations, rel=1e-9)


def test_a_layer_of_a_dense_model_has_twelve_launches() -> None:
    """Four products, two norms, rotation, KV, attention and its joining, gate, sum. Beside the layers: tokens,
    positions and wanted rows into the graph's places, embedding, last norm, wanted rows, output layer, logits into
    their place; a summary in two, results in one.
    """
    step = step_of(LLAMA_8B, DECODE)
    names = Counter[str]()
    for launch, count in step.launches.items():
        names[launch.name] += count
    assert names["linear"] == 4 * LAYERS + 1
    assert names["norm_rows"] == 2 * LAYERS + 1
    for name in ("rotate_rows", "write_slots", "attend_pieces", "join_parts", "gate_rows", "add"):
        assert names[name] == LAYERS, name
    assert step.count == 12 * LAYERS + 12
    assert step.graphs == 1


def test_steps_beyond_the_graphs_are_launched_one_by_one() -> None:
    large = step_of(LLAMA_8B, Regime(1, 0, 8192))
    assert large.graphs == 0
    assert not any(launch.recorded for launch in large.launches)
    assert launching_seconds(large, 1.0, 0.0) > 6 * LAYERS
    assert launching_seconds(step_of(LLAMA_8B, PROMPT), 1.0, 1.0) < 12


@pytest.mark.parametrize("base", [LLAMA_8B, QWEN_30B], ids=lambda model: model.name)
@pytest.mark.parametrize("regime", [DECODE, PROMPT], ids=str)
def test_two_layers_stand_for_all(base: LedgerModel, regime: Regime) -> None:
    model = LedgerModel(base.name, {**base.fields, "num_hidden_layers": 4})
    assert step_of(model, regime).launches == Counter(RecordedEngine(model, 4).step(regime).launches)


def test_ranks_add_up_twice_a_layer_and_have_an_eighth_of_the_matrices() -> None:
    step = step_of(LLAMA_70B, DECODE)
    hidden, inner, layers = 8192, 28_672, 80
    matrices = hidden * (64 + 2 * 8) * 128 + 64 * 128 * hidden + 3 * hidden * inner
    norms = (2 * layers + 1) * hidden
    assert step.total(lambda work: work.weights) == 2 * ((layers * matrices + VOCABULARY * hidden) // 8 + norms)
    sums = 2 * layers * 2 * 7 / 8 * (64 * hidden * 2)
    logits = 64 * VOCABULARY * 7 / 8 * 2
    assert step.total(lambda work: work.linked) == pytest.approx(sums + logits, rel=1e-9)
    assert floor_of(step, H100).seconds == pytest.approx(step.total(lambda work: work.weights + work.kv) / 3.35e12)
    names = Counter[str]()
    for launch, count in step.launches.items():
        names[launch.name] += count
    assert names["all_gather"] == names["add_ranks"] == 2 * layers
    assert step.count == 16 * layers + 13, "those of one device, and an exchange and a kernel for each sum"
    assert step.graphs == 1


@pytest.mark.parametrize("shared", [0, 20], ids=["nothing shared", "320 tokens shared by all"])
def test_attention_costs_what_its_tokens_see(shared: int) -> None:
    """Decodes and a prompt in one step, and keys that several decodes have in the same pages."""
    engine = LedgerEngine.of(LLAMA_8B, 1, None, None)
    slices = [(row, 400 + 3 * row, 1) for row in range(12)] + [(12, 40, 300)]
    tables = np.arange(13 * 32, dtype=np.int32).reshape(1, 13, 32)
    tables[0, 1:12, :shared] = tables[0, 0, :shared]
    positions = np.concatenate([np.arange(before, before + now) for _, before, now in slices])
    shape = StepShape(
        np.array(slices, np.int32), positions, np.zeros((1, len(positions)), int), tables, np.zeros(13, int), None
    )
    with recorded() as recording, torch.inference_mode():
        queries = torch.empty((len(positions), HEADS, DIM), dtype=torch.bfloat16, device="meta")
        engine.attention.attend(0, queries, engine.attention.plan(shape))
    work = [launch.work for launch in recording.launches if launch.name == "attend_pieces"]
    assert len(work) == (3 if shared else 2)
    assert sum(one.operations for one in work) == 4 * HEADS * DIM * int((positions + 1).sum())
    keys = sum(before + now for _, before, now in slices)
    once = keys - 11 * (256 if shared else 0)  # chunks of 256 keys are shared as a whole
    assert sum(one.kv for one in work) == 4 * KV_HEADS * DIM * once
    tiles = -(-once // 64) * KV_HEADS
    assert sum(one.tiles for one in work) > tiles


def test_a_kernel_without_known_costs_is_an_error() -> None:
    with pytest.raises(KeyError, match="recur_tokens"):
        costs.of_kernel("recur_tokens", {})


def test_empty_launches_take_the_host_alone() -> None:
    full, empty = (Launch("add", Work(costs.ROWS, activations=1e9), False, False, one) for one in (False, True))
    rates = published.rates()
    assert device_seconds(LedgerStep(Counter({empty: 3}), 0), DECODE, H100, rates) == 0
    assert launching_seconds(LedgerStep(Counter({empty: 3}), 0), 5.0, 2.0) == 6.0
    assert device_seconds(LedgerStep(Counter({full: 1}), 0), DECODE, H100, rates) == pytest.approx(
        1e9 / 3.35e12 / rates.copy
    )


def test_a_prediction_keeps_its_floor_and_scales_with_the_device() -> None:
    rates = published.rates()
    shares = (rates.product_memory, rates.product_multiply, rates.copy, rates.decode.memory, rates.prefill.multiply)
    assert all(0.2 < share < 1 for share in (*shares, rates.mixture.memory, rates.mixture.multiply))
    for model in LEDGER:
        for regime in (DECODE, PROMPT):
            step = step_of(model, regime)
            slow, fast = (device_seconds(step, regime, device, rates) for device in (H100, H200))
            assert floor_of(step, H100).seconds < slow
            assert 1 <= slow / fast < 4.8 / 3.35


def test_a_mixture_reads_no_more_experts_than_there_are() -> None:
    step = step_of(QWEN_30B, PROMPT)
    experts = sum(count * launch.work.weights for launch, count in step.launches.items() if launch.work.kind == MIXTURE)
    assert experts == pytest.approx(48 * 128 * 3 * 2048 * 768 * 2, rel=1e-9)


def test_each_step_has_the_time_of_the_host() -> None:
    _, times = host.read()
    assert times.keys() == {host.case_of(model, one) for model, regimes in host.measured_cases() for one in regimes}
    assert all(one.engine > 0 and one.launched > 0 for one in times.values())


def test_the_page_has_the_tables_of_the_command() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert page.filled(written, tables()) == written, "run `python -m bench.gpu_ledger --write`"


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no single place for the table steps"):
        page.filled("# Nothing", {"steps": ""})


SASS = """
        /*0010*/                   HMMA.16816.F32.BF16 R4, R2, R8, R4 ;   /* 0x1 */
        /*0020*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R2, R8, R4 ;
        /*0040*/              @!P6 BRA 0x20 ;
        /*0050*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0060*/                @P0 BRA 0x50 ;
        /*0070*/                @P0 BRA 0x10 ;
        /*0080*/                   BRA 0x80;
"""


def test_a_tile_is_the_smallest_loop_with_products() -> None:
    assert code.loop_length(SASS) == 3
    with pytest.raises(ValueError, match="no loop"):
        code.loop_length(SASS.replace("HMMA", "FFMA"))


@pytest.mark.slow
def test_the_compiled_code_is_what_this_version_compiles() -> None:
    version, kernels = code.read()
    if version != triton.__version__:
        pytest.skip(f"the figures are Triton {version}'s")
    assert code.compiled() == kernels


def test_the_page_is_marked_as_a_prediction() -> None:
    assert "**Everything on this page is a prediction**" in Path(PAGE).read_text(encoding="utf-8").split("##")[0]
