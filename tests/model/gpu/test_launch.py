"""Launches, up to the point where a GPU would have to be there: kernels compile for what they are really given, and
are not compiled again because a batch has another shape.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton import knobs, runtime
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.on_gpu.check_recurrence import random_recurrence
from bench.on_gpu.mixtures import MixtureShape, by_kernels, random_mixture
from cache_manager.layout import KVLayout
from model.gpu import group_linear
from model.gpu.attention import attend_pieces, join_parts
from model.gpu.attention_backend import TritonAttention
from model.gpu.cache_write import write_slots
from model.gpu.compilations import Compilations
from model.gpu.cutoff import bound_draws, draw_listed, list_tokens, weigh_blocks
from model.gpu.draws import GpuOps
from model.gpu.expert_choice import add_places, arrange_places, choose_experts, count_places
from model.gpu.expert_product import multiply_experts
from model.gpu.group_linear import MOST_ROWS, GroupProduct
from model.gpu.group_product import multiply_groups, unpack_groups
from model.gpu.line_product import multiply_lines
from model.gpu.mixtures import run_all_tiles, silu_gated
from model.gpu.parts import KernelGatedMLP, KernelNorm, KernelSelfAttention, KernelSummed
from model.gpu.recurrence import convolve_pieces, keep_windows, recur_tokens
from model.gpu.rows import add_ranks, gate_rows, norm_rows, rotate_rows
from model.gpu.sampler import draw_blocks, join_draws, join_summaries, summarise_blocks
from model.layers import silu
from model.parallel.shard import Shard
from model.parallel.unconnected import Unconnected
from model.recurrent import ConvolutionShape, ScanShape
from model.rope import Rope, frequencies
from model.weight_formats.groups import GroupFormat
from model.weight_formats.int4 import Int4Format
from model.weight_formats.int8 import Int8Format
from model.weight_formats.plain import plain_weight
from model.weight_formats.scratch import Scratch
from tests.model.gpu.kernels.test_recurrence import LAYER, SHAPES, STEPS, Rig
from tests.model.gpu.kernels.test_sampler import draws_of
from tests.model.test_attention import Case, Pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU"),
]

CPU = torch.device("cpu")
DTYPE = "bfloat16"


class Driver:
    """The driver of a GPU that does nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], int]:
    """Counts the variants of a kernel. Launches compile, and launch nothing."""
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(runtime.driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    for kernel in (
        attend_pieces,
        join_parts,
        write_slots,
        multiply_groups,
        multiply_lines,
        unpack_groups,
        convolve_pieces,
        keep_windows,
        recur_tokens,
        add_ranks,
        gate_rows,
        norm_rows,
        rotate_rows,
        choose_experts,
        count_places,
        arrange_places,
        multiply_experts,
        add_places,
        weigh_blocks,
        bound_draws,
        list_tokens,
        draw_listed,
        draw_blocks,
        join_draws,
        join_summaries,
        summarise_blocks,
    ):
        kernel.device_caches.clear()
    return lambda kernel: len(kernel.device_caches[0][0])


class DryPool(Pool):
    def __init__(self, case: Case, kv: str = DTYPE) -> None:
        self.kv = kv
        super().__init__(case)

    attention: TritonAttention

    def _backend(self, layout: KVLayout, pages: int) -> TritonAttention:
        return TritonAttention(layout, pages, self.heads, self.kv, CPU, DTYPE)


@pytest.mark.parametrize(("page_size", "latent"), [(16, 0), (7, 0), (16, 512)])
def test_attention_is_compiled_once_for_each_kind(compiled: Callable[[Any], int], page_size: int, latent: int) -> None:
    lengths = ((700, 1), (3, 700), (600, 40), (0, 2))
    case = Case(lengths, 4, head_dim=64 + latent, page_size=page_size, dtype=DTYPE, latent=latent)
    pool = DryPool(replace(case, kv_heads=1) if latent else case)
    pool.attention.prepare()
    ready = [compiled(kernel) for kernel in (write_slots, join_parts, attend_pieces)]
    kinds = 4 if latent == 512 else 5  # few, some, many, shared, some and many in graphs; the last two may be alike
    assert ready == [1, 1, kinds]
    for slices in (
        [(0, 700, 1), (1, 3, 600), (2, 600, 40)],
        [(0, 699, 1)],
        [(3, 0, 2), (0, 80, 1), (1, 3, 333)],
        [(2, 512, 37)],
        [(1, 3, 1), (0, 700, 1)],
    ):
        pool.step(slices)
    assert [compiled(kernel) for kernel in (write_slots, join_parts, attend_pieces)] == ready


def test_a_compilation_is_told(
    compiled: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While there is one, the time of the last one is now: an engine that waits for it does not hang."""
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    seen = list[float]()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **_: seen.append(made.last) or False)
    made = Compilations()
    made.watch()
    assert (made.last, made.count) == (0.0, 0)
    began = time.monotonic()
    silu_gated(torch.randn(3, 64))
    assert made.count == len(seen) == compiled(gate_rows) == 1
    assert began < made.last <= time.monotonic()
    assert seen[0] > began, "the other hook runs while this is not over"
    made.expect_none()
    silu_gated(torch.randn(3, 64))
    assert not caplog.records
    silu_gated(torch.randn(3, 64, dtype=torch.bfloat16))
    assert made.count == 2
    assert "a step waited" in caplog.text
    assert "gate_rows" in caplog.text


def test_mixtures_are_compiled_once_for_each_size_of_tiles(compiled: Callable[[Any], int]) -> None:
    shape = MixtureShape(16, 2, 64, 32)
    made = by_kernels(random_mixture(CPU, shape, 0, torch.float16))
    kernels = (choose_experts, count_places, arrange_places, multiply_experts, add_places)
    run_all_tiles([made], torch.float16, CPU, 8192)
    # Few, and more, and many rows; directly; of both products.
    ready = [1, 1, 4, 10, 1]
    assert [compiled(kernel) for kernel in kernels] == ready
    for tokens in (1, 2, 60, 61, 150, 151, 300, 400):
        made(torch.zeros((tokens, 64), dtype=torch.float16))
    assert [compiled(kernel) for kernel in kernels] == ready


def test_draws_from_the_top_are_compiled_once(compiled: Callable[[Any], int]) -> None:
    for rows in (1, 2, 17):
        draws = replace(draws_of(list(range(rows)), 1.0), top_k=np.full(rows, 3))
        GpuOps().draw_from_top(torch.zeros((rows, 9000)), draws)
    for kernel in (weigh_blocks, bound_draws, list_tokens, draw_listed):
        assert compiled(kernel) == 1, kernel


def test_parts_and_sampler_are_compiled_once(compiled: Callable[[Any], int]) -> None:
    rope = Rope(frequencies(64, 100.0), 40, torch.bfloat16, CPU)
    attention = KernelSelfAttention(0, 4, 2, 64, None, None, rope)  # type: ignore[arg-type]
    norm, ops = KernelNorm(torch.ones(512, dtype=torch.bfloat16), 1e-6), GpuOps()
    for rows in (1, 2, 17, 64):
        x = torch.randn(rows, 512, dtype=torch.bfloat16)
        norm.of_sum(x, x)
        KernelGatedMLP(lambda x, *_: x, lambda x, *_: x, silu)(x)
        KernelSummed(lambda x, *_: x, Unconnected(Shard(0, 2)))(x)
        step = type("Step", (), {"positions": torch.arange(rows)})()
        attention.rotate(x.view(rows, 8, 64)[:, :6], step)
        logits = torch.randn(rows, 9000)
        ops.summary(logits)
        ops.draw(logits, draws_of(list(range(rows)), 1.0))
    for kernel in (
        norm_rows,
        gate_rows,
        add_ranks,
        rotate_rows,
        summarise_blocks,
        join_summaries,
        draw_blocks,
        join_draws,
    ):
        assert compiled(kernel) == 1, kernel


def test_pages_in_eight_bits_are_one_variant_each(compiled: Callable[[Any], int]) -> None:
    for kv in ("int8", "fp8"):
        pool = DryPool(Case(((0, 20), (700, 1)), 4, head_dim=64, dtype=DTYPE), kv)
        pool.step([(0, 0, 20)])
        pool.step([(0, 0, 17)])
    assert (compiled(write_slots), compiled(attend_pieces)) == (2, 2)


@pytest.mark.parametrize("name", SHAPES)
def test_recurrent_layers_are_compiled_once(compiled: Callable[[Any], int], name: str) -> None:
    shape = SHAPES[name]
    rig = Rig(shape, CPU)
    rig.kernels.prepared(LAYER, shape)
    ready = [compiled(kernel) for kernel in (convolve_pieces, keep_windows, recur_tokens)]
    assert ready == [1, 1, 1]
    taps, bias = rig.random(shape.channels, shape.taps), rig.random(shape.channels)
    for slices in STEPS:
        plan, tokens = rig.plan(rig.segments(slices)), sum(count for _, _, count in slices)
        x = rig.random(tokens, shape.channels + 5)[:, : shape.channels]
        rig.kernels.convolve(LAYER, x, taps, bias if isinstance(shape, ScanShape) else None, True, plan)
        rig.kernels.recur(LAYER, random_recurrence(CPU, shape, tokens), plan)
    assert [compiled(kernel) for kernel in (convolve_pieces, keep_windows, recur_tokens)] == ready


def test_short_convolutions_are_compiled_with_and_without_a_bias(compiled: Callable[[Any], int]) -> None:
    shape = ConvolutionShape(channels=48, taps=3)
    rig = Rig(shape, CPU)
    rig.kernels.prepared(LAYER, shape)
    for slices in STEPS:
        plan, tokens = rig.plan(rig.segments(slices)), sum(count for _, _, count in slices)
        for bias in (None, rig.random(48)):
            rig.kernels.convolve(LAYER, rig.random(tokens, 48), rig.random(48, 3), bias, False, plan)
    assert [compiled(kernel) for kernel in (convolve_pieces, keep_windows, recur_tokens)] == [2, 1, 0]


@pytest.mark.parametrize("form", [Int4Format(), Int8Format()], ids=lambda form: form.name)
def test_products_with_groups_are_compiled_once(
    form: GroupFormat, compiled: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of rows (lines for 16, 32 and 64), and any block of outputs that many rows are multiplied with."""
    monkeypatch.setattr(group_linear, "unpacked_outputs", lambda _: 128)
    weight, dtype = plain_weight(torch.randn(400, 256)), torch.bfloat16
    product = GroupProduct(form, [weight], None, dtype, Scratch(dtype, CPU), CPU)
    for rows in (1, 2, 16, 17, MOST_ROWS, MOST_ROWS + 1, MOST_ROWS + 2):
        assert product(torch.randn(rows, 256, dtype=dtype)).shape == (rows, 400)
    lines = product.parts[0].has_lines
    expected = [0, 3, 1] if lines else [1, 0, 1]
    assert [compiled(kernel) for kernel in (multiply_groups, multiply_lines, unpack_groups)] == expected
