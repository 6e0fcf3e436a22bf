"""Checks the attention kernels against float64, over a pool whose pages that no slice may read are NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.on_gpu import truth
from bench.on_gpu.pages import Book, Slices, picked, poisoned
from bench.on_gpu.truth import Error, Tolerance
from cache_manager.layout import KVLayout, KVShape, LayerGroup
from model.gpu.attention_backend import TritonAttention

Lengths = tuple[tuple[int, int], ...]
"""Tokens in the cache, and tokens of the step, for each sequence."""
LENGTHS: Lengths = ((6000, 1), (1500, 1), (16, 1), (0, 1), (700, 1), (530, 40), (0, 300), (200, 290))
"""Decodes over several parts and none, and slices with few, some and many queries."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One case of attention.

    Attributes:
        dtype: Dtype of queries, keys and values.
        group: Query heads of a KV head.
        head_dim: Dimension of a head.
        page_size: Tokens of a page.
        kv: "int8" or "fp8"; None stores `dtype`.
        window: Tokens that a query sees; None sees all.
        cap: Soft cap of the scores; None has none.
        shared: Tokens at the front that sequences share, with their pages. Sequences with fewer cached tokens do not.
        kv_heads: Number of KV heads.
        latent: Elements of a key that are its value (latent attention, of one KV head); 0 where values are kept.
        lengths: Lengths of the sequences; () takes the common ones.
    """

    dtype: str
    group: int
    head_dim: int
    page_size: int = 16
    kv: str | None = None
    window: int | None = None
    cap: float | None = None
    shared: int = 0
    kv_heads: int = 2
    latent: int = 0
    lengths: Lengths = ()

    @property
    def name(self) -> str:
        parts = [self.dtype, f"group {self.group}", f"heads of {self.head_dim}", f"pages of {self.page_size}"]
        parts += [f"values of {self.latent} in keys"] if self.latent else []
        parts += [f"KV in {self.kv}"] if self.kv is not None else []
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"{self.shared} tokens shared"] if self.shared else []
        return ", ".join(parts + ([f"soft cap {self.cap:g}"] if self.cap is not None else []))

    @property
    def layout(self) -> KVLayout:
        width = 1 if self.kv else getattr(torch, self.dtype).itemsize
        shape = KVShape(self.kv_heads, self.head_dim, self.latent or self.head_dim, bool(self.latent))
        return KVLayout((LayerGroup((0,), shape, self.window),), width, self.page_size, 4 if self.kv else 0)

    @property
    def allowed(self) -> Tolerance:
        """Tolerance. Values of 8 bits are multiplied in bfloat16, whose range fits their scales."""
        return truth.ATTENTION["bfloat16" if self.kv and self.dtype == "float16" else self.dtype]


CASES = (
    AttentionCase("bfloat16", 4, 128),
    AttentionCase("bfloat16", 4, 128, kv="fp8"),
    AttentionCase("bfloat16", 3, 64, 7),
    AttentionCase("bfloat16", 8, 128, window=100),
    AttentionCase("float16", 4, 128),
    AttentionCase("float32", 4, 64),
    AttentionCase("bfloat16", 4, 256, cap=30.0),
    AttentionCase("bfloat16", 4, 128, shared=1200, lengths=tuple((1205 + 57 * i, 1) for i in range(12))),
    AttentionCase("bfloat16", 16, 576, kv_heads=1, latent=512),
    AttentionCase("bfloat16", 128, 576, kv="fp8", kv_heads=1, latent=512),
    AttentionCase("bfloat16", 4, 128, kv="int8"),
    AttentionCase("bfloat16", 1, 64),
    AttentionCase("bfloat16", 4, 80, 7, window=33),
    AttentionCase("float32", 8, 128, 7, cap=20.0),
    AttentionCase("bfloat16", 8, 64, 7, kv="fp8", window=100),
    AttentionCase("float16", 3, 80, cap=50.0, window=200),
    AttentionCase("bfloat16", 2, 256, kv="fp8", cap=30.0),
    AttentionCase("float16", 1, 80, kv="int8"),
    AttentionCase("bfloat16", 3, 64, 7, kv="int8"),
    AttentionCase("float32", 1, 256),
    AttentionCase("bfloat16", 16, 128),
)
"""Cases of most models come first: later ones may be skipped for lack of time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check.

    Attributes:
        parts: Largest errors of "decode" and "prefill".
        allowed: Tolerance of the case.
        problems: Descriptions of what is wrong; empty if all is right.
    """

    parts: dict[str, Error]
    allowed: Tolerance
    problems: tuple[str, ...]


class Pool:
    """The sequences of a case, with the keys and values of earlier tokens in their pages."""

    def __init__(self, case: AttentionCase, lengths: Lengths, device: torch.device, seed: int = 0) -> None:
        self.case, self.lengths = case, lengths
        alike = [i for i, (before, _) in enumerate(lengths) if case.shared and before >= case.shared]
        self.book = Book.of([before + now for before, now in lengths], case.page_size, seed)
        self.book = self.book.sharing(alike, case.shared // case.page_size)
        self.attention = TritonAttention(
            case.layout, self.book.pages, case.kv_heads * case.group, case.kv or case.dtype, device, case.dtype,
            soft_cap=case.cap,
        )  # fmt: skip
        self.attention.poison(np.arange(self.book.pages, dtype=np.int32))
        made = torch.Generator().manual_seed(seed)

        def random(heads: int) -> list[Tensor]:
            shapes = [(before + now, heads, case.head_dim) for before, now in lengths]
            dtype = getattr(torch, case.dtype)
            return [(1.5 * torch.randn(shape, generator=made)).to(dtype).to(device) for shape in shapes]

        self.keys, self.values = random(case.kv_heads), random(case.kv_heads)
        self.queries = random(case.kv_heads * case.group)
        for part in (self.keys, self.values):
            for i in alike:
                part[i][: case.shared] = part[alike[0]][: case.shared]
        if case.latent:
            self.values = [keys[..., : case.latent] for keys in self.keys]
        self.remember([(i, 0, before) for i, (before, _) in enumerate(lengths) if before])

    def remember(self, slices: Slices) -> None:
        plan = self.attention.plan(self.book.shape(slices))
        self.attention.write(0, picked(self.keys, slices), picked(self.values, slices), plan)

    def step(self, slices: Slices) -> list[Tensor]:
        """Runs a step, and returns the output of each slice."""
        with poisoned():
            plan = self.attention.plan(self.book.shape(slices))
            self.attention.write(0, picked(self.keys, slices), picked(self.values, slices), plan)
            out = self.attention.attend(0, picked(self.queries, slices), plan)
        return list(out.split([count for _, _, count in slices]))

    def forget(self) -> None:
        """Takes pages before the window of all tokens of the step away, and fills them with NaN."""
        for i, (before, _) in enumerate(self.lengths):
            dead = max(0, before + 1 - (self.case.window or before + 1)) // self.case.page_size
            self.book, lost = self.book.without(i, dead)
            if dead:
                self.attention.poison(lost)

    def expected(self, sequence: int) -> Tensor:
        before, case = self.lengths[sequence][0], self.case
        keys, values = (truth.stored(part[sequence], case.kv) for part in (self.keys, self.values))
        values = keys[..., : case.latent] if case.latent else values  # of a key in 8 bits they have its scale
        return truth.attention(self.queries[sequence][before:], keys, values, before, case.window, case.cap)


def check(case: AttentionCase, lengths: Lengths, device: torch.device) -> Verdict:
    """Checks steps of all sequences, of the decodes alone, and of each decode alone."""
    pool = Pool(case, lengths, device)
    now = [(i, before, count) for i, (before, count) in enumerate(lengths)]
    pool.step(now)
    problems = [*wrong_pages(pool)]
    pool.forget()
    mixed = pool.step(now)
    parts: dict[str, list[Error]] = {}
    for i, (_, count) in enumerate(lengths):
        kind = "decode" if count == 1 else "prefill"
        parts.setdefault(kind, []).append(Error.of(mixed[i], pool.expected(i)))
    problems += differing(pool, mixed)
    worst = {kind: Error.worst(errors) for kind, errors in parts.items()}
    problems += [f"{kind}: too far from float64" for kind, error in worst.items() if not error.within(case.allowed)]
    return Verdict(worst, case.allowed, tuple(problems))


def differing(pool: Pool, mixed: Sequence[Tensor]) -> list[str]:
    """Returns decodes whose bits differ among other slices, among decodes, and alone.

    Nothing is checked if decodes share the reads of their first keys: that changes the order of sums.
    """
    decodes = [(i, before, 1) for i, (before, count) in enumerate(pool.lengths) if count == 1]
    if decodes and pool.attention.plan(pool.book.shape(decodes)).shares:
        return []
    together = pool.step(decodes) if decodes else []
    problems = []
    for one, beside in zip(decodes, together, strict=True):
        (alone,) = pool.step([one])
        if not torch.equal(alone, beside) or not torch.equal(alone, mixed[one[0]]):
            problems.append(f"a decode after {one[1]} tokens has other bits in a batch")
    return problems


def wrong_pages(pool: Pool) -> list[str]:
    """Checks that pages hold what was written, bit by bit, and that all else is still NaN."""
    case, book = pool.case, pool.book
    content = pool.attention.export(np.arange(book.pages, dtype=np.int32), np.zeros(book.pages, np.int32))
    slots = torch.from_numpy(np.concatenate([book.slots(i, 0, sum(n)) for i, n in enumerate(pool.lengths)]))
    slots = slots.to(content.device)
    others = torch.ones(book.pages * case.page_size, dtype=torch.bool, device=content.device)
    others[slots] = False
    dtype = torch.uint8 if case.kv else getattr(torch, case.dtype)
    expected = [torch.cat(part) for part in (pool.keys, pool.values)[: 1 if case.latent else 2]]
    kinds = [(dtype, case.head_dim)] * len(expected) + [(torch.float32, 1)] * (len(expected) if case.kv else 0)
    if case.kv:
        stored = [truth.eight_bits(part, case.kv) for part in expected]
        expected = [part for kept in zip(*stored, strict=True) for part in kept]
    problems, at = [], 0
    for (kind, width), wanted in zip(kinds, expected, strict=True):
        size = case.page_size * case.kv_heads * width * kind.itemsize
        found = content[:, at : at + size].contiguous().view(kind).view(-1, case.kv_heads, width)
        at += size
        if not torch.equal(found[slots].view(torch.uint8), wanted.to(found.device).contiguous().view(torch.uint8)):
            problems.append("pages hold other numbers than were written")
        if kind.is_floating_point and not found[others].isnan().all():
            problems.append("something was written outside the sequences' slots")
    return problems
