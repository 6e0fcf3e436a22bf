"""Whether the attention of kernels is right: beside float64, over pages of which those that nobody may read are NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.on_gpu import truth
from bench.on_gpu.pages import Book, Slices, picked, poisoned
from bench.on_gpu.truth import Error, Tolerance
from cache_manager.layout import KVLayout
from model.gpu.attention_backend import TritonAttention

Lengths = tuple[tuple[int, int], ...]
"""Of each sequence: tokens that are in the cache, and tokens of the step."""
LENGTHS: Lengths = ((6000, 1), (1500, 1), (16, 1), (0, 1), (700, 1), (530, 40), (0, 300), (200, 290))
"""Decodes over several parts and none, and slices with few, some and many queries."""


@dataclass(frozen=True, slots=True)
class Case:
    """kv: int8 or fp8; None is as the dtype. window: tokens that one sees. cap: of the scores. shared:
    tokens at the front that all sequences with as many in the cache have in common, and the pages that hold them.
    lengths: () for those of the others.
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
    lengths: Lengths = ()

    @property
    def name(self) -> str:
        parts = [self.dtype, f"group {self.group}", f"heads of {self.head_dim}", f"pages of {self.page_size}"]
        parts += [f"KV in {self.kv}"] if self.kv is not None else []
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"{self.shared} tokens shared"] if self.shared else []
        return ", ".join(parts + ([f"soft cap {self.cap:g}"] if self.cap is not None else []))

    @property
    def allowed(self) -> Tolerance:
        """Values of 8 bits are mixed in bfloat16, with which their scales fit."""
        return truth.ATTENTION["bfloat16" if self.kv and self.dtype == "float16" else self.dtype]


CASES = (
    Case("bfloat16", 4, 128),
    Case("bfloat16", 4, 128, kv="fp8"),
    Case("bfloat16", 3, 64, 7),
    Case("bfloat16", 8, 128, window=100),
    Case("float16", 4, 128),
    Case("float32", 4, 64),
    Case("bfloat16", 4, 256, cap=30.0),
    Case("bfloat16", 4, 128, shared=1200, lengths=tuple((1205 + 57 * i, 1) for i in range(12))),
    Case("bfloat16", 4, 128, kv="int8"),
    Case("bfloat16", 1, 64),
    Case("bfloat16", 4, 80, 7, window=33),
    Case("float32", 8, 128, 7, cap=20.0),
    Case("bfloat16", 8, 64, 7, kv="fp8", window=100),
    Case("float16", 3, 80, cap=50.0, window=200),
    Case("bfloat16", 2, 256, kv="fp8", cap=30.0),
    Case("float16", 1, 80, kv="int8"),
    Case("bfloat16", 3, 64, 7, kv="int8"),
    Case("float32", 1, 256),
    Case("bfloat16", 16, 128),
)
"""Those that most models need come first: all that follows may be left out where time is short."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """parts: errors of the step, by what was in it. problems: what was wrong; none is right."""

    parts: dict[str, Error]
    allowed: Tolerance
    problems: tuple[str, ...]


class Pool:
    """The sequences of a case, with all that has been computed of them written into their pages."""

    def __init__(self, case: Case, lengths: Lengths, device: torch.device, seed: int = 0) -> None:
        self.case, self.lengths = case, lengths
        alike = [i for i, (before, _) in enumerate(lengths) if case.shared and before >= case.shared]
        self.book = Book.of([before + now for before, now in lengths], case.page_size, seed)
        self.book = self.book.sharing(alike, case.shared // case.page_size)
        width = 1 if case.kv else getattr(torch, case.dtype).itemsize
        windows = () if case.window is None else (case.window,)
        layout = KVLayout(
            ((0,),), case.kv_heads, case.head_dim, width, case.page_size, 4 if case.kv else 0, windows
        )  # fmt: skip
        self.attention = TritonAttention(
            layout, self.book.pages, case.kv_heads * case.group, case.kv or case.dtype, device, case.dtype,
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
        self.remember([(i, 0, before) for i, (before, _) in enumerate(lengths) if before])

    def remember(self, slices: Slices) -> None:
        plan = self.attention.plan(self.book.shape(slices))
        self.attention.write(0, picked(self.keys, slices), picked(self.values, slices), plan)

    def step(self, slices: Slices) -> list[Tensor]:
        """The output of each slice."""
        with poisoned():
            plan = self.attention.plan(self.book.shape(slices))
            self.attention.write(0, picked(self.keys, slices), picked(self.values, slices), plan)
            out = self.attention.attend(0, picked(self.queries, slices), plan)
        return list(out.split([count for _, _, count in slices]))

    def forget(self) -> None:
        """Pages that lie before the window of all tokens of the step are somebody else's: NaN."""
        for i, (before, _) in enumerate(self.lengths):
            dead = max(0, before + 1 - (self.case.window or before + 1)) // self.case.page_size
            self.book, lost = self.book.without(i, dead)
            if dead:
                self.attention.poison(lost)

    def expected(self, sequence: int) -> Tensor:
        before, case = self.lengths[sequence][0], self.case
        keys, values = (truth.stored(part[sequence], case.kv) for part in (self.keys, self.values))
        return truth.attention(self.queries[sequence][before:], keys, values, before, case.window, case.cap)


def check(case: Case, lengths: Lengths, device: torch.device) -> Verdict:
    """A step of all sequences, one of the decodes alone, and one of a decode alone."""
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
    """A decode's bits are to be the same among other slices, among decodes, and alone; unless its first keys are read
    once for several.
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
    """Whether pages hold what was written, bit by bit, and the rest is NaN still."""
    case, book = pool.case, pool.book
    content = pool.attention.export(np.arange(book.pages, dtype=np.int32))
    slots = torch.from_numpy(np.concatenate([book.slots(i, 0, sum(n)) for i, n in enumerate(pool.lengths)]))
    slots = slots.to(content.device)
    others = torch.ones(book.pages * case.page_size, dtype=torch.bool, device=content.device)
    others[slots] = False
    dtype = torch.uint8 if case.kv else getattr(torch, case.dtype)
    kinds = [(dtype, case.head_dim)] * 2 + [(torch.float32, 1)] * (2 if case.kv else 0)
    expected = [torch.cat(part) for part in (pool.keys, pool.values)]
    if case.kv:
        (keys, key_scales), (values, value_scales) = (truth.eight_bits(part, case.kv) for part in expected)
        expected = [keys, values, key_scales, value_scales]
    problems, at = [], 0
    for (kind, width), wanted in zip(kinds, expected, strict=True):
        size = case.page_size * case.kv_heads * width * kind.itemsize
        found = content[:, at : at + size].contiguous().view(kind).view(-1, case.kv_heads, width)
        at += size
        if not torch.equal(found[slots].view(torch.uint8), wanted.to(found.device).contiguous().view(torch.uint8)):
            problems.append("pages hold other numbers than were written")
        if kind.is_floating_point and not found[others].isnan().all():
            problems.append("something was written where nobody's tokens are")
    return problems
