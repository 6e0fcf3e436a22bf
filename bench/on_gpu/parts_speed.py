"""Measures the other kernels by the bytes that they must read and write a second."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bench.on_gpu.attention_speed import DIM, HEADS, KV_HEADS, PAGE
from bench.on_gpu.bench import Bench
from bench.on_gpu.check_parts import Noted, unchanged
from bench.on_gpu.check_recurrence import random_recurrence
from bench.on_gpu.memory import free
from bench.on_gpu.pages import Book
from bench.on_gpu.report import Table
from bench.on_gpu.states import LAYER, StateBook
from bench.on_gpu.timing import Work, seconds_of
from cache_manager.layout import KVLayout
from model.forward import ForwardBatch
from model.gpu.attention_backend import TritonAttention
from model.gpu.draws import GpuOps
from model.gpu.parts import KernelGatedMLP, KernelNorm, KernelSelfAttention
from model.gpu.state_plan import StatePlan
from model.layers import silu
from model.recurrent import DeltaShape
from model.rope import Rope, frequencies
from model.sampling.random import row_keys
from model.sampling.sampler import TORCH_OPS, Draws, LogitOps

HIDDEN, INNER, VOCABULARY, ROWS = 4096, 14336, 128_256, 256  # of an 8B Llama; rows of logits
TOKENS = 2**14
DELTA, PROMPT = DeltaShape(16, 32, 128, 128, 4), 1024  # of a Qwen 3.5 4B; tokens of a sequence
A_PART = 3.0  # seconds

Made = tuple[float, Work]
"""Bytes of a call, and the call."""


def parts_speed(bench: Bench) -> None:
    table = Table("other kernels, speed", {
        "kernel": "", "MB": ",.0f", "ms": ".4f", "spread": ".0%", "GB/s": ",.0f", "of copy": ".0%",
    })  # fmt: skip
    table.notes.append(f"{TOKENS:,} tokens of an 8B Llama, bfloat16: more than L2 holds. The sampler's time has its "
                       f"wait for the result in it ({ROWS} rows of {VOCABULARY:,}). Recurrent layers are those of a "
                       f"Qwen 3.5 4B: prompts of {PROMPT:,} tokens, {ROWS} sequences that decode.")  # fmt: skip
    with torch.inference_mode():
        for name, make in PARTS.items():
            if not bench.budget.allows(A_PART):
                table.skip(name, bench.budget.why_not(A_PART))
                continue
            with table.attempt(name):
                size, work = make(bench.device)
                timing = seconds_of(bench.timer, work, 7)
                rate = size / timing.median
                table.add(**{
                    "kernel": name, "MB": size / 1e6, "ms": 1e3 * timing.median, "spread": timing.spread,
                    "GB/s": rate / 1e9, "of copy": rate / bench.ceilings.copy if bench.ceilings else None,
                })  # fmt: skip
                del work
            free()
    bench.report.publish(table)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def write(device: torch.device, kv: str | None = None) -> Made:
    """Writes keys and values, strided like a layer's, to random pages."""
    book, width = Book.of([TOKENS], PAGE), 1 if kv else 2
    layout = KVLayout.uniform(((0,),), KV_HEADS, DIM, width, PAGE, 4 if kv else 0)
    attention = TritonAttention(layout, book.pages, HEADS, kv or "bfloat16", device, "bfloat16")
    plan = attention.plan(book.shape([(0, 0, TOKENS)]))
    _, keys, values = _random(device, TOKENS, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    read = keys.numel() * 2 * keys.element_size()
    return read + TOKENS * layout.token_bytes, lambda: attention.write(0, keys, values, plan)


def norm(device: torch.device) -> Made:
    x, weight = _random(device, TOKENS, HIDDEN), _random(device, HIDDEN)
    kernel = KernelNorm(weight, 1e-5)
    return 2 * x.nbytes, lambda: kernel(x)


def norm_of_sum(device: torch.device) -> Made:
    x, added, weight = _random(device, TOKENS, HIDDEN), _random(device, TOKENS, HIDDEN), _random(device, HIDDEN)
    kernel = KernelNorm(weight, 1e-5)
    return 4 * x.nbytes, lambda: kernel.of_sum(x, added)


def rotation(device: torch.device) -> Made:
    """Rotates queries and keys, in a layer whose products and attention have no work."""
    qkv = _random(device, TOKENS, (HEADS + 2 * KV_HEADS) * DIM)
    rope = Rope(frequencies(DIM, 10_000.0), TOKENS, torch.bfloat16, device)
    layer = KernelSelfAttention(0, HEADS, KV_HEADS, DIM, unchanged, unchanged, rope)
    places = torch.arange(TOKENS, device=device)
    batch = ForwardBatch(places, places[None], places, Noted(), None)  # type: ignore[arg-type]
    return 2 * qkv.nbytes * (HEADS + KV_HEADS) / (HEADS + 2 * KV_HEADS), lambda: layer(qkv, batch)


def gate(device: torch.device) -> Made:
    gate_up = _random(device, TOKENS, 2 * INNER)
    kernel = KernelGatedMLP(unchanged, unchanged, silu)
    return 1.5 * gate_up.nbytes, lambda: kernel(gate_up)


def summary(device: torch.device) -> Made:
    logits, ops = torch.randn((ROWS, VOCABULARY), device=device), GpuOps()
    return logits.nbytes, lambda: ops.summary(logits)


def draw(device: torch.device) -> Made:
    logits, ops, draws = torch.randn((ROWS, VOCABULARY), device=device), GpuOps(), draws_of(ROWS, 0, 1.0)
    return logits.nbytes, lambda: ops.draw(logits, draws)


def draw_from_top(
    device: torch.device, rows: int | None = None, spread: float = 6.0, ops: LogitOps | None = None, top_k: int = 20
) -> Made:  # fmt: skip
    """Draws with top_p 0.9. A spread of 1 is a flat distribution, of which nothing can be left out beforehand."""
    rows = ROWS if rows is None else rows
    logits, draws = spread * torch.randn((rows, VOCABULARY), device=device), draws_of(rows, top_k, 0.9)
    made = GpuOps() if ops is None else ops
    return logits.nbytes, lambda: made.draw_from_top(logits, draws)


def draws_of(rows: int, top_k: int, top_p: float) -> Draws:
    none = np.zeros(rows, np.int64)
    keys = row_keys(np.arange(rows, dtype=np.uint64), none, none)
    return Draws(np.arange(rows), keys, np.ones(rows), np.zeros(rows), none + top_k, np.full(rows, top_p))


def convolution(device: torch.device) -> Made:
    """Convolves the channels of a Qwen 3.5 4B, in prefills."""
    book, plan = _prefills(device)
    x, taps = torch.randn((TOKENS, DELTA.channels), device=device), torch.randn((DELTA.channels, 4), device=device)
    return 2 * x.nbytes, lambda: book.states.convolve(LAYER, x, taps, None, True, plan)


def prefills(device: torch.device) -> Made:
    """Runs the delta rule of a Qwen 3.5 4B over prompts, token by token."""
    book, plan = _prefills(device)
    of = random_recurrence(device, DELTA, TOKENS)
    return of.queries.nbytes + of.keys.nbytes + 2 * of.values.nbytes, lambda: book.states.recur(LAYER, of, plan)


def decodes(device: torch.device) -> Made:
    """Runs it for one token of each of many sequences: their states are read and written."""
    book, of = StateBook.of(DELTA, ROWS, 16, device), random_recurrence(device, DELTA, ROWS)
    book.states.recur(LAYER, of, book.plan([(row, 0, 1) for row in range(ROWS)]))
    plan = book.plan([(row, 1, 1) for row in range(ROWS)])
    return 2 * ROWS * 4 * DELTA.heads * DELTA.key_dim * DELTA.value_dim, lambda: book.states.recur(LAYER, of, plan)


def _prefills(device: torch.device) -> tuple[StateBook, StatePlan]:
    count = TOKENS // PROMPT
    book = StateBook.of(DELTA, count, PROMPT, device)
    return book, book.plan([(row, 0, PROMPT) for row in range(count)])


PARTS: dict[str, Callable[[torch.device], Made]] = {
    "KV write, bfloat16": write,
    "KV write, fp8": lambda device: write(device, "fp8"),
    "norm": norm,
    "norm of a sum": norm_of_sum,
    "rotation of queries and keys": rotation,
    "gate": gate,
    "sampler: summary": summary,
    "sampler: draw": draw,
    "sampler: top_k 20, top_p 0.9": draw_from_top,
    "sampler: top_p 0.9": lambda device: draw_from_top(device, top_k=0),
    "sampler: top_p 0.9, flat": lambda device: draw_from_top(device, spread=1.0, top_k=0),
    "sampler: top_k 20, top_p 0.9, one row": lambda device: draw_from_top(device, 1),
    "torch's sort: top_k 20, top_p 0.9, 32 rows": lambda device: draw_from_top(device, 32, ops=TORCH_OPS),
    "short convolution": convolution,
    "delta rule, prefill": prefills,
    "delta rule, decode": decodes,
}
