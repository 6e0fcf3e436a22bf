"""Measures the attention kernels beside torch's on the same shapes, interleaved."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.on_gpu.bench import Bench
from bench.on_gpu.flex import flex_decode, flex_prefill
from bench.on_gpu.memory import free
from bench.on_gpu.pages import Book, Slices
from bench.on_gpu.report import ATTENTION_GOAL, Goal, Table
from bench.on_gpu.timing import Timing, Work, measure
from cache_manager.layout import KVLayout
from model.gpu.attention_backend import TritonAttention

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MEGABYTE = 2**20
ROTATED = 512 * MEGABYTE
"""Bytes of KV that calls cycle over, layer by layer, like a model's steps: several times the size of any L2."""
WRITTEN = 2**15  # tokens written at once
GOAL_FROM = 64  # MiB a layer
DECODES = (
    (8, 1), (8, 16), (64, 1), (64, 16), (64, 64), (256, 4), (256, 64), (256, 256), (1024, 8), (1024, 64), (1024, 256),
)  # fmt: skip
"""MiB of KV a layer, sequences."""
FLEX_DECODES = frozenset([(64, 16), (1024, 64)])  # each takes many seconds to compile
SHARED = ((2048, 32), (8192, 32), (8192, 128))
"""Tokens of a shared prompt, and number of sequences; each has `OWN` further tokens."""
OWN = 128
PREFILLS = (2048, 8192)
A_DECODE, A_PREFILL = 6.0, 12.0  # seconds
COLUMNS = {"case": "", "ms": ".4f", "spread": ".0%"}
OTHERS = ("SDPA", "flex")


@dataclass(frozen=True, slots=True)
class Decodes:
    """A decode step.

    Attributes:
        batch: Number of sequences.
        context: Tokens of each, of which the last is computed.
        layers: Number of layers.
        kv: "fp8" or "int8"; None is bfloat16.
    """

    batch: int
    context: int
    layers: int
    kv: str | None

    @staticmethod
    def of(megabytes: int, batch: int, kv: str | None) -> "Decodes":
        """Returns the step of `batch` sequences with this much KV a layer in all."""
        context = megabytes * MEGABYTE // (batch * token_bytes(kv))
        return Decodes(batch, context, max(1, ROTATED // (megabytes * MEGABYTE)), kv)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that a call reads."""
        return self.batch * self.context * token_bytes(self.kv)


def token_bytes(kv: str | None) -> int:
    """Returns the bytes of a token's KV in a layer, scales included."""
    return KVLayout.uniform(((0,),), KV_HEADS, DIM, 1 if kv else 2, PAGE, 4 if kv else 0).token_bytes


def filled(
    book: Book, layers: int, sequences: int, tokens: int, kv: str | None, device: torch.device
) -> TritonAttention:
    """Returns attention over sequences of `tokens` random keys and values."""
    layout = KVLayout.uniform((tuple(range(layers)),), KV_HEADS, DIM, 1 if kv else 2, PAGE, 4 if kv else 0)
    attention = TritonAttention(layout, book.pages, HEADS, kv or "bfloat16", device, "bfloat16")
    at_once = max(1, WRITTEN // tokens)
    for first in range(0, sequences, at_once):
        slices = [(i, 0, tokens) for i in range(first, min(first + at_once, sequences))]
        plan = attention.plan(book.shape(slices))
        for layer in range(layers):
            shape = (2, len(slices) * tokens, KV_HEADS, DIM)
            keys, values = torch.randn(shape, dtype=torch.bfloat16, device=device)
            attention.write(layer, keys, values, plan)
    return attention


def ours(attention: TritonAttention, book: Book, slices: Slices, layers: int, device: torch.device) -> Work:
    """Returns a function that computes one layer's attention a call, in turn."""
    plan = attention.plan(book.shape(slices))
    tokens = sum(count for _, _, count in slices)
    queries = torch.randn((tokens, HEADS, DIM), dtype=torch.bfloat16, device=device)
    layer = cycle(range(layers))
    return lambda: attention.attend(next(layer), queries, plan)


def sdpa(batch: int, tokens: int, seen: int, layers: int, device: torch.device) -> tuple[Work, list[Tensor], Tensor]:
    """Returns torch's attention over contiguous keys and values, with these and the queries."""
    shape = (2, batch, KV_HEADS, seen, DIM)
    stores = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
    queries = torch.randn((batch, HEADS, tokens, DIM), dtype=torch.bfloat16, device=device)
    turn, causal = cycle(stores), tokens > 1

    def attend() -> Tensor:
        keys, values = next(turn)
        return scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)

    return attend, stores, queries


def attention_speed(bench: Bench) -> None:
    with torch.inference_mode():
        found = [decode_table(bench, kv) for kv in (None, "fp8")]
        bench.report.publish(*(table for table, _ in found))
        large = {f"{name}, KV in {kv}": part for (_, parts), kv in zip(found, ("bfloat16", "fp8"), strict=True)
                 for name, part in parts.items()}  # fmt: skip
        bench.report.reached(Goal.least(ATTENTION_GOAL, large))
        bench.report.publish(shared_table(bench))
        bench.report.publish(prefill_table(bench))


def decode_table(bench: Bench, kv: str | None) -> tuple[Table, dict[str, float]]:
    """Measures decode steps; returns the table, and shares of the copy bandwidth for the cases of the goal."""
    table = Table(f"decode attention, KV in {kv or 'bfloat16'}", COLUMNS | {
        "GB/s": ",.0f", "of copy": ".0%", **dict.fromkeys(OTHERS, ".4f"), "times SDPA": ".2f",
    })  # fmt: skip
    table.notes.append(
        f"{KV_HEADS} KV heads of {DIM}, {HEADS} query heads, pages of {PAGE} in random places; bytes of KV only. "
        f"Layers take turns over {ROTATED // MEGABYTE} MiB and more, so that L2 holds none of it. SDPA and flex "
        "(compiled): ms, bfloat16 KV that lies one after the other, as much of it."
    )
    large: dict[str, float] = {}
    for megabytes, batch in DECODES:
        case = Decodes.of(megabytes, batch, kv)
        name = f"{megabytes} MiB: {batch} x {case.context:,}"
        if not bench.budget.allows(A_DECODE):
            table.skip(name, bench.budget.why_not(A_DECODE))
            continue
        with table.attempt(name):
            flex = kv is None and (megabytes, batch) in FLEX_DECODES
            times = decode_times(bench, case, flex)
            row = timed(name, times)
            rate = case.bytes / own(times).median
            part = rate / bench.ceilings.copy if bench.ceilings else None
            table.add(**row, **{"GB/s": rate / 1e9, "of copy": part})
            table.notes += complaints(name, times)
            if part is not None and megabytes >= GOAL_FROM:
                large[name] = part
        free()
    return table, large


def decode_times(bench: Bench, case: Decodes, flex: bool) -> dict[str, Timing | str]:
    device = bench.device
    book = Book.of([case.context] * case.batch, PAGE)
    attention = filled(book, case.layers, case.batch, case.context, case.kv, device)
    slices = [(i, case.context - 1, 1) for i in range(case.batch)]
    works: dict[str, Work] = {"": ours(attention, book, slices, case.layers, device)}
    if case.kv is None:
        works["SDPA"], stores, queries = sdpa(case.batch, 1, case.context, case.layers, device)
        if flex:
            works["flex"] = flex_decode(queries, stores)
    return measure(bench.timer, works, 7)


def shared_table(bench: Bench) -> Table:
    table = Table("decode attention after one prompt, bfloat16", COLUMNS | {"alone": ".4f", "times alone": ".2f"})
    table.notes.append(
        f"Sequences go on from one prompt, with {OWN} tokens of their own each. alone: ms, the same if each "
        "has a copy of the prompt on its own pages."
    )
    for shared, batch in SHARED:
        name = f"{shared:,} tokens, {batch} sequences"
        if not bench.budget.allows(A_DECODE):
            table.skip(name, bench.budget.why_not(A_DECODE))
            continue
        with table.attempt(name):
            times = measure(bench.timer, shared_works(bench, shared, batch), 7)
            mine, alone = own(times), times["alone"]
            row: dict[str, object] = {"case": name, "ms": 1e3 * mine.median, "spread": mine.spread}
            if isinstance(alone, Timing):
                row |= {"alone": 1e3 * alone.median, "times alone": alone.median / mine.median}
            table.add(**row)
            table.notes += complaints(name, times)
        free()
    return table


def shared_works(bench: Bench, shared: int, batch: int) -> dict[str, Work]:
    """Returns both works over one pool; the values in it do not matter for times."""
    tokens = shared + OWN
    book = Book.of([tokens] * batch, PAGE)
    attention = filled(book, 1, batch, tokens, None, bench.device)
    slices = [(i, tokens - 1, 1) for i in range(batch)]
    together = book.sharing(range(batch), shared // PAGE)
    return {
        "": ours(attention, together, slices, 1, bench.device),
        "alone": ours(attention, book, slices, 1, bench.device),
    }


def prefill_table(bench: Bench) -> Table:
    table = Table("prefill attention, bfloat16", COLUMNS | {
        "TFLOP/s": ",.0f", "of product": ".0%", **dict.fromkeys(OTHERS, ".4f"), "times SDPA": ".2f",
    })  # fmt: skip
    table.notes.append(f"One sequence, causal, {HEADS} query heads of {DIM}, {KV_HEADS} KV heads; operations of what "
                       "is seen only. SDPA and flex (compiled): ms, KV that lies one after the other.")  # fmt: skip
    for tokens in PREFILLS:
        name = f"{tokens:,} tokens"
        if not bench.budget.allows(A_PREFILL):
            table.skip(name, bench.budget.why_not(A_PREFILL))
            continue
        with table.attempt(name):
            times = prefill_times(bench, tokens)
            rate = prefill_operations(tokens) / own(times).median
            part = rate / bench.ceilings.multiply if bench.ceilings else None
            table.add(**timed(name, times), **{"TFLOP/s": rate / 1e12, "of product": part})
            table.notes += complaints(name, times)
        free()
    return table


def prefill_operations(tokens: int) -> float:
    """Returns the operations of scores and weighted values, over pairs of a query and a key that it sees."""
    return 4.0 * HEADS * DIM * tokens * (tokens + 1) / 2


def prefill_times(bench: Bench, tokens: int) -> dict[str, Timing | str]:
    book = Book.of([tokens], PAGE)
    attention = filled(book, 1, 1, tokens, None, bench.device)
    works = {"": ours(attention, book, [(0, 0, tokens)], 1, bench.device)}
    works["SDPA"], stores, queries = sdpa(1, tokens, tokens, 1, bench.device)
    works["flex"] = flex_prefill(queries, stores)
    return measure(bench.timer, works, 7)


def own(times: Mapping[str, Timing | str]) -> Timing:
    """Returns the kernel's own timing. Raises RuntimeError with its error."""
    timing = times[""]
    if isinstance(timing, str):
        raise RuntimeError(timing)
    return timing


def timed(name: str, times: Mapping[str, Timing | str]) -> dict[str, object]:
    """Returns the columns that all tables have."""
    mine = own(times)
    others = {key: timing for key, timing in times.items() if key and isinstance(timing, Timing)}
    row: dict[str, object] = {"case": name, "ms": 1e3 * mine.median, "spread": mine.spread}
    row |= {key: 1e3 * timing.median for key, timing in others.items()}
    return row | ({"times SDPA": others["SDPA"].median / mine.median} if "SDPA" in others else {})


def complaints(name: str, times: Mapping[str, Timing | str]) -> list[str]:
    """Returns notes about the other implementations that failed."""
    return [f"{key} failed on {name}: {why}" for key, why in times.items() if isinstance(why, str)]
