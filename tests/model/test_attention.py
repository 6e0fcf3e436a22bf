"""The back ends against plain float64 attention, on ragged slices, random pages and a poisoned pool."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout, KVShape
from model.alibi import alibi_slopes
from model.attention.backend import AttentionBackend, StepShape
from model.cpu.attention_backend import CpuAttention
from model.cpu.kernels.attention import CHUNK, LISTED
from model.cpu.kernels.kv import BLOCK
from model.cpu.pieces import Pieces
from model.kv_pool import EIGHT_BIT, to_eight_bit
from model.reference.attention_backend import ReferenceAttention
from tests.support.examples import examples, is_quick
from tests.support.kernels import the_machine
from tests.support.pages import exported, imported, sizes_of

Floats = NDArray[np.float64]
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """lengths: (tokens already in the cache, tokens of the step) of each sequence. windows: of each layer; () makes one
    group of all layers. kernels: of the CPU, not the reference. kv: int8 or fp8; None is as dtype. sinks: one a head.
    latent: elements of a key that are its value too; all heads read one key then. sloped: scores fall with distance.
    chunked: windows are chunks.
    """

    lengths: tuple[tuple[int, int], ...]
    group: int
    kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 16
    dtype: str = "float32"
    seed: int = 0
    windows: tuple[int | None, ...] = ()
    kernels: bool = False
    kv: str | None = None
    sinks: bool = False
    latent: int = 0
    sloped: bool = False
    chunked: bool = False

    @property
    def kept_heads(self) -> int:
        return 1 if self.latent else self.kv_heads

    @property
    def layout(self) -> KVLayout:
        groups = tuple((layer,) for layer in range(LAYERS)) if self.windows else (tuple(range(LAYERS)),)
        sizes = sizes_of(self.kv or self.dtype)
        made = KVLayout.uniform(
            groups, self.kept_heads, self.head_dim, page_size=self.page_size, windows=self.windows, **sizes
        )
        parts = [replace(group, chunked=self.chunked and group.window is not None) for group in made.groups]
        if self.latent:
            parts = [replace(group, shape=KVShape(1, self.head_dim, self.latent, latent=True)) for group in parts]
        return replace(made, groups=tuple(parts))


class Pool:
    """A back end with sequences on random pages of a pool that is NaN everywhere else."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, np.random.default_rng(case.seed)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        layout = case.layout
        groups = len(layout.groups)
        needed = [layout.pages_for(before + now) // groups for before, now in case.lengths]
        self.pages = pages = sum(needed) * groups + 5
        self.heads = case.kv_heads * case.group
        self.slopes = alibi_slopes(self.heads) if case.sloped else ()
        self.attention = self._backend(layout, pages)
        self.attention.poison(np.arange(pages, dtype=np.int32))
        shuffled = self.rng.permutation(pages).astype(np.int32)
        # Entries of a table past a sequence's pages are meaningless: here the id of a page without an owner.
        rows = len(case.lengths) + 2
        self.tables = np.full((groups, rows, max(needed) + 3), shuffled[-1], np.int32)
        self.rows = self.rng.permutation(rows)[: len(case.lengths)]
        first = 0
        for row, count in zip(self.rows, needed, strict=True):
            for table in self.tables:
                table[row, :count] = shuffled[first : first + count]
                first += count
        self.keys, self.values = ([self._random(sum(n), case.kept_heads) for n in case.lengths] for _ in range(2))
        if case.latent:
            self.values = [keys[..., : case.latent] for keys in self.keys]
        self.queries = [self._random(sum(n), self.heads) for n in case.lengths]
        self.sinks = torch.linspace(-2.0, 4.0, self.heads) if case.sinks else None
        self.bidirectional: dict[int, int] = {}

    def _backend(self, layout: KVLayout, pages: int) -> AttentionBackend:
        if self.case.kernels:
            eight_bit = self.case.kv
            return CpuAttention(
                the_machine(), layout, pages, self.heads, self.case.dtype, eight_bit=eight_bit, slopes=self.slopes
            )
        dtype = self.case.kv or self.case.dtype
        return ReferenceAttention(layout, pages, self.heads, dtype, torch.device("cpu"), slopes=self.slopes)

    def _random(self, tokens: int, heads: int) -> Tensor:
        return torch.from_numpy(self.rng.normal(size=(tokens, heads, self.case.head_dim)) * 1.5).to(self.dtype)

    def stored(self, sequence: int) -> tuple[Floats, Floats]:
        """Its keys and values, as their dtype in the pool lets them be."""
        keys, values = (part[sequence] for part in (self.keys, self.values))
        if self.case.kv is None:
            return keys.double().numpy(), values.double().numpy()
        kind = EIGHT_BIT[self.case.kv]
        made = [(numbers.view(kind), scale) for numbers, scale in (to_eight_bit(p, kind) for p in (keys, values))]
        keys, values = (numbers.double() * scale for numbers, scale in made)
        values = keys[..., : self.case.latent] if self.case.latent else values
        return keys.numpy(), values.numpy()

    def shape(self, slices: list[tuple[int, int, int]]) -> StepShape:
        """slices: (sequence, start, count)."""
        size, packed, positions, slots = self.case.page_size, [], [], []
        for sequence, start, count in slices:
            where = np.arange(start, start + count)
            packed.append((self.rows[sequence], start, count))
            positions.append(where)
            slots.append(self.tables[:, self.rows[sequence], where // size].astype(np.int64) * size + where % size)
        return StepShape(
            np.array(packed, np.int32),
            np.concatenate(positions),
            np.concatenate(slots, axis=1),
            self.tables,
            np.array([self.bidirectional.get(sequence, 0) for sequence, _, _ in slices]),
        )

    def slide(self, sequence: int, computed: int) -> None:
        """Pages that no position from `computed` on sees are another sequence's: NaN, and in tables an id of no use."""
        for table, window in zip(self.tables, self.case.windows, strict=False):
            dead = max(0, computed + 1 - window) // self.case.page_size if window else 0
            self.attention.poison(table[self.rows[sequence], :dead])
            table[self.rows[sequence], :dead] = table[:, -1].max()

    def share(self, tokens: int, sequences: int) -> None:
        """The first of them all begin with the pages of the first, of this number of tokens."""
        for other in range(1, sequences):
            pages = min(tokens, *(self.case.lengths[i][0] for i in (0, other))) // self.case.page_size
            self.tables[:, self.rows[other], :pages] = self.tables[:, self.rows[0], :pages]
            for part in (self.keys, self.values):
                part[other][: pages * self.case.page_size] = part[0][: pages * self.case.page_size]

    def step(self, slices: list[tuple[int, int, int]], layer: int = 0) -> list[Tensor]:
        """Writes and attends; the output of each slice."""

        def pick(tensors: list[Tensor]) -> Tensor:
            return torch.cat([tensors[sequence][start : start + count] for sequence, start, count in slices])

        plan = self.attention.plan(self.shape(slices))
        self.attention.write(layer, pick(self.keys), pick(self.values), plan)
        mixed = self.attention.attend(layer, pick(self.queries), plan, self.sinks)
        assert mixed.dtype == self.dtype
        return list(mixed.split([count for _, _, count in slices]))


def plain_attention(
    queries: Floats,
    keys: Floats,
    values: Floats,
    start: int,
    window: int | None = None,
    whole: int = 0,
    sinks: Tensor | None = None,
    slopes: Sequence[float] = (),
    chunked: bool = False,
) -> Floats:
    """[tokens, heads, head_dim]: query i stands at position start + i and sees keys up to its own, `window` of them;
    one of the first `whole` sees all of these. slopes: what a score loses for each token of distance, by head.
    chunked: of the keys up to its own it sees those from the last multiple of `window` on.
    """
    group = queries.shape[1] // keys.shape[1]
    mixed = np.empty((*queries.shape[:2], values.shape[-1]))
    for i, query in enumerate(queries):
        end = start + i + 1
        first = max(0, end - window) if window else 0
        if window and chunked:
            first = end - 1 - (end - 1) % window
        if start + i < whole:
            first, end = 0, whole
        for head, vector in enumerate(query):
            seen = keys[first:end, head // group], values[first:end, head // group]
            scores = seen[0] @ vector / np.sqrt(len(vector))
            scores -= slopes[head] * (start + i - np.arange(first, end)) if slopes else 0.0
            sink = -np.inf if sinks is None else float(sinks[head])
            highest = max(scores.max(), sink)
            weights = np.exp(scores - highest)
            mixed[i, head] = weights @ seen[1] / (weights.sum() + np.exp(sink - highest))
    return mixed


def cases_of(
    *,
    kernels: bool,
    groups: list[int],
    dims: list[int],
    pages: list[int],
    dtypes: list[str],
    long: list[int],
    kvs: list[str | None],
    latents: list[int],
) -> st.SearchStrategy[Case]:
    """long: tokens that may be in the cache beside the usual numbers."""
    before = st.sampled_from([0, 0, 1, 15, 16, 40, 127, 128, 200, *long])
    return st.builds(
        Case,
        lengths=st.lists(st.tuples(before, st.sampled_from([1, 1, 2, 5, 16, 17, 130])), min_size=1, max_size=4).map(
            tuple
        ),
        group=st.sampled_from(groups),
        kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from(dims),
        page_size=st.sampled_from(pages),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**32 - 1),
        windows=st.sampled_from([(), (), (None, 5), (130, 33), (1, 1), (129, None), (16, 128)]),
        kernels=st.just(kernels),
        kv=st.sampled_from(kvs),
        sinks=st.booleans(),
        latent=st.just(0) | st.sampled_from(latents),
        sloped=st.booleans(),
        chunked=st.booleans(),
    ).filter(lambda case: case.latent <= case.head_dim and not (case.sinks and case.sloped))


FEW = (
    {"group": 3, "kv_heads": 1, "head_dim": 16, "dtype": "float32", "kv": None, "sinks": False},
    {"group": 3, "kv_heads": 3, "head_dim": 48, "dtype": "float32", "kv": None, "sinks": True},
    {"group": 3, "kv_heads": 2, "head_dim": 48, "dtype": "bfloat16", "kv": "fp8", "sinks": True},
    {"group": 3, "kv_heads": 2, "head_dim": 48, "dtype": "float32", "kv": "int8", "sinks": False},
    {"group": 1, "kv_heads": 2, "head_dim": 16, "dtype": "bfloat16", "kv": None, "sinks": False},
    {"group": 1, "kv_heads": 1, "head_dim": 48, "dtype": "bfloat16", "kv": "int8", "sinks": False},
    {"group": 20, "kv_heads": 3, "head_dim": 16, "dtype": "float32", "kv": "fp8", "sinks": True},
    {"group": 20, "kv_heads": 1, "head_dim": 48, "dtype": "bfloat16", "kv": None, "sinks": False},
    {"group": 1, "kv_heads": 3, "head_dim": 32, "dtype": "bfloat16", "kv": None, "sinks": True},
    {"group": 3, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "kv": None, "sinks": False},
    {"group": 20, "kv_heads": 1, "head_dim": 96, "dtype": "bfloat16", "kv": None, "sinks": False, "latent": 32},
    {"group": 3, "kv_heads": 2, "head_dim": 48, "dtype": "bfloat16", "kv": None, "sinks": False, "sloped": True},
    {"group": 20, "kv_heads": 1, "head_dim": 48, "dtype": "bfloat16", "kv": None, "sinks": False, "latent": 32},
    {"group": 3, "kv_heads": 1, "head_dim": 48, "dtype": "float32", "kv": None, "sinks": False, "latent": 16},
    {"group": 3, "kv_heads": 1, "head_dim": 48, "dtype": "bfloat16", "kv": "fp8", "sinks": False, "latent": 32},
)
"""Shapes of kernels in a quick run: each takes a second to compile, longer than all that is computed with it."""


def few_shapes(case: Case, shape: dict[str, Any]) -> Case:
    return replace(case, **{"latent": 0, "sloped": False} | shape) if is_quick() else case


cases = cases_of(
    kernels=False,
    groups=[1, 2, 3, 8, 20],
    dims=[2, 6, 16, 24],
    pages=[1, 2, 7, 16, 64],
    dtypes=["float32", "bfloat16", "float16"],
    long=[],
    kvs=[None, "int8"],
    latents=[2, 6, 20],
) | st.builds(
    few_shapes,
    cases_of(
        kernels=True,
        groups=[1, 3, 20],
        dims=[16, 48, 64],
        pages=[1, 7, 16, 64],
        dtypes=["float32", "bfloat16"],
        long=[511, 512, 600],
        kvs=[None, None, "int8", "fp8"],
        latents=[16, 32],
    ),
    st.sampled_from(FEW),
)
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 3e-3}


@settings(max_examples=examples(40), deadline=None)
@given(case=cases)
@example(Case(((0, 300), (255, 1), (127, 2)), group=3, page_size=7))
@example(Case(((0, 1),), group=1, kv_heads=1, page_size=1, sinks=True))
@example(Case(((0, 300), (255, 1), (127, 2)), group=3, page_size=7, sloped=True))
@example(Case(((600, 1), (530, 30)), group=3, head_dim=48, page_size=7, windows=(33, None), kernels=True, sloped=True))
@example(Case(((600, 1), (530, 30)), group=1, kv_heads=3, head_dim=48, kernels=True, kv="int8", sloped=True))
@example(Case(((128, 128), (0, 129)), group=8, page_size=16))
@example(Case(((600, 1), (1500, 1), (530, 30)), group=3, kv_heads=1, head_dim=16, kernels=True))
@example(Case(((1500, 1),), group=3, kv_heads=3, head_dim=48, page_size=64, windows=(700, None), kernels=True))
@example(Case(((0, 400), (300, 1), (260, 90)), group=2, page_size=7, windows=(120, 3)))
@example(Case(((0, 400), (300, 1), (260, 90)), group=2, page_size=7, windows=(120, 3), chunked=True))
@example(Case(((600, 1), (240, 1), (530, 99)), group=3, head_dim=48, windows=(120, 3), kernels=True, chunked=True))
@example(
    Case(((600, 1), (530, 30)), group=3, head_dim=48, windows=(33, None), dtype="bfloat16", kernels=True, kv="fp8")
)
@example(Case(((600, 1), (530, 30)), group=3, head_dim=48, page_size=7, windows=(33, None), kernels=True, kv="int8"))
@example(Case(((600, 1), (530, 30)), group=16, kv_heads=1, head_dim=576, latent=512, kernels=True))
@example(Case(((600, 1), (530, 30)), group=16, head_dim=576, latent=512, dtype="bfloat16", kernels=True))
@example(Case(((600, 1), (130, 30)), group=20, kv_heads=1, head_dim=576, latent=512, page_size=7, kernels=True))
@example(Case(((600, 1), (530, 30)), group=4, kv_heads=1, head_dim=256, dtype="bfloat16", kernels=True))
@example(Case(((600, 1), (530, 30)), group=4, kv_heads=1, head_dim=256, kernels=True, kv="int8"))
@example(
    Case(((600, 1), (530, 90)), group=5, head_dim=96, page_size=7, windows=(33, None), dtype="bfloat16", kernels=True)
)
@example(Case(((600, 1), (530, 90)), group=20, kv_heads=1, head_dim=32, dtype="bfloat16", kernels=True, sloped=True))
def test_equals_plain_attention(case: Case) -> None:
    pool = Pool(case)
    for layer in range(LAYERS):
        history = [(i, 0, before) for i, (before, _) in enumerate(case.lengths) if before]
        if history:
            pool.step(history, layer)
        for i, (before, _) in enumerate(case.lengths):
            if layer == LAYERS - 1:  # tables are the same for all layers: those before have been looked at
                pool.slide(i, before)
        outputs = pool.step([(i, before, now) for i, (before, now) in enumerate(case.lengths)], layer)
        for i, ((before, now), output) in enumerate(zip(case.lengths, outputs, strict=True)):
            expected = plain_attention(
                pool.queries[i][before : before + now].double().numpy(),
                *pool.stored(i),
                before,
                case.windows[layer] if case.windows else None,
                sinks=pool.sinks,
                slopes=pool.slopes,
                chunked=case.chunked,
            )
            np.testing.assert_allclose(output.double().numpy(), expected, atol=TOLERANCE[case.dtype], rtol=0)


@settings(max_examples=examples(40), deadline=None)
@given(case=cases, data=st.data())
def test_tokens_that_see_each_other_in_both_directions(case: Case, data: st.DataObject) -> None:
    """All of them in one slice with what comes after, or what is left of them behind pages that are there; a second
    slice goes on. The other sequences are causal.
    """
    pool = Pool(replace(case, sloped=False))
    length = sum(case.lengths[0])
    whole = data.draw(st.integers(1, length), label="whole")
    cached = data.draw(st.integers(0, whole - 1), label="cached")
    end = data.draw(st.integers(whole, length), label="end")
    pool.bidirectional[0] = whole
    others = [(i, 0, sum(n)) for i, n in enumerate(case.lengths) if i]
    for layer in range(LAYERS):
        # Cached tokens were computed with the same keys, which are given here.
        outputs = pool.step([(0, 0, end), *others], layer)
        if cached:
            (again,) = pool.step([(0, cached, end - cached)], layer)
            assert torch.equal(again, outputs[0][cached:])
        rest = pool.step([(0, end, length - end)], layer) if end < length else []
        expected = plain_attention(
            pool.queries[0].double().numpy(),
            *pool.stored(0),
            0,
            case.windows[layer] if case.windows else None,
            whole,
            pool.sinks,
            chunked=case.chunked,
        )
        found = torch.cat([outputs[0], *rest]).double().numpy()
        np.testing.assert_allclose(found, expected, atol=TOLERANCE[case.dtype], rtol=0)
        causal = pool.step(others, layer) if others else []
        assert all(torch.equal(a, b) for a, b in zip(outputs[1:], causal, strict=True))


@settings(max_examples=examples(30), deadline=None)
@given(case=cases, data=st.data())
def test_bits_do_not_depend_on_batch_chunks_or_pages(case: Case, data: st.DataObject) -> None:
    """Sequence 0 in one piece, alone, on pages of 16; then cut at random among the others, on other pages."""
    length = sum(case.lengths[0])
    together = Pool(case)
    alone = Pool(replace(case, lengths=case.lengths[:1], page_size=16, seed=case.seed + 1))
    alone.keys[0], alone.values[0], alone.queries[0] = together.keys[0], together.values[0], together.queries[0]
    layer = LAYERS - 1
    (expected,) = alone.step([(0, 0, length)], layer)
    done = [0] * len(case.lengths)
    pieces = []
    while done[0] < length:
        slices = []
        for i, total in enumerate(map(sum, case.lengths)):
            count = min(total - done[i], data.draw(st.integers(1 if i == 0 else 0, 140)))
            if count:
                slices.append((i, done[i], count))
                done[i] += count
        slices = data.draw(st.permutations(slices))
        outputs = together.step(slices, layer)
        for i, end in enumerate(done):
            together.slide(i, end)
        pieces.append(outputs[[s[0] for s in slices].index(0)])
    assert torch.equal(torch.cat(pieces).view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "head_dim": 64},
        {"kv": "int8", "page_size": 32},
        {"page_size": 7, "sinks": True},
        {"head_dim": 32, "latent": 16},
    ],
)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.sample(3)
def test_bits_do_not_depend_on_what_is_shared(
    group: int, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that some have in common are computed once for all of them: of two sequences, of more than fit in a tile,
    of some of these and of all; beside those that share nothing, short ones, and a prompt.
    """
    chunk = CHUNK * BLOCK
    lengths = ((2 * chunk + 40, 1), (2 * chunk + 3, 1), *((chunk + 9 + i, 1) for i in range(30)), (2 * chunk + 40, 1))
    case = Case((*lengths, (30, 1), (3, 20)), group, 2, **{"head_dim": 16, "kernels": True} | change)
    alone, together = Pool(case), Pool(case)
    together.share(chunk + 5, len(lengths) - 1)
    together.share(2 * chunk, 2)
    for mine, theirs in ((alone.keys, together.keys), (alone.values, together.values)):
        mine[:] = [part.clone() for part in theirs]
    alone.queries = together.queries
    now = [(i, before, count) for i, (before, count) in enumerate(case.lengths)]
    expected, found = [], []
    for pool, into in ((alone, expected), (together, found)):
        pool.step([(i, 0, before) for i, before, _ in now])
        monkeypatch.setattr("model.attention.sharing.SHARERS", 2)
        into += pool.step(now)
        (part,) = pool.attention.plan(pool.shape(now)).groups
        assert any(len(tokens) > 1 for tokens in shared_by(part.pieces)) == (pool is together)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def shared_by(pieces: Pieces) -> list[list[int]]:
    """Tokens of each piece of decodes that have keys in common."""
    lists = {(part.ctypes.data, part.ctypes.data + part.nbytes): part for part in pieces.lists}
    found = []
    for _, address, count, *_, partial in pieces.several.tolist():
        for (start, end), part in lists.items():
            if partial >= 0 and start <= address < end:
                first = (address - start) // (8 * LISTED)
                found.append(part[first : first + count, 0].tolist())
    return found


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20])
@pytest.mark.parametrize("head_dim", [2, 6, 8, 10, 16, 24, 64, 80, 96, 128])
def test_bits_do_not_depend_on_a_tile_s_place_in_the_step(group: int, head_dim: int) -> None:
    """MKL's product has other bits where its result is not aligned to 16 bytes; matrices of a batch lie end to end."""
    case = Case(((0, 140), (0, 3), (0, 20)), group, kv_heads=1, head_dim=head_dim)
    (whole,) = Pool(case).step([(0, 0, 140)])
    cut = Pool(case)
    first, _ = cut.step([(0, 0, 43), (1, 0, 3)])
    _, second = cut.step([(2, 0, 20), (0, 43, 97)])
    assert torch.equal(torch.cat((first, second)), whole)


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_writes_go_to_the_named_slots_of_their_layer_only(page_size: int, layer: int) -> None:
    pool = Pool(Case(((3, 9), (0, 1), (20, 2)), group=2, page_size=page_size))
    slices = [(0, 3, 9), (1, 0, 1), (2, 20, 2)]
    rows, everything = pool.attention.pool, pool.attention.pool.places(0, np.arange(pool.pages * page_size))
    before = [rows.read(number, everything) for number in range(LAYERS)]
    slots = pool.shape(slices).slots[0]
    pool.step(slices, layer)
    others = np.setdiff1d(np.arange(pool.pages * page_size), slots)
    for which, source in enumerate((pool.keys, pool.values)):
        written = torch.cat([source[i][start : start + count] for i, start, count in slices])
        now = [rows.read(number, everything)[which] for number in range(LAYERS)]
        assert torch.equal(now[layer][:, slots], written.transpose(0, 1))
        for number in range(LAYERS):
            kept = others if number == layer else np.arange(pool.pages * page_size)
            assert torch.equal(now[number][:, kept].view(torch.int32), before[number][which][:, kept].view(torch.int32))


KV_KINDS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", "fp8")]


@pytest.mark.parametrize(("dtype", "kv"), KV_KINDS)
@pytest.mark.parametrize("page_size", [1, 7, 16, 48])
def test_kernels_pages_have_the_canonical_form_of_the_reference(dtype: str, kv: str | None, page_size: int) -> None:
    """Each back end imports what the other exports; copies and poison touch exactly their pages."""
    layout = KVLayout.uniform(((0, 1), (2, 3)), 3, 16, page_size=page_size, **sizes_of(kv or dtype))
    kernels = CpuAttention(the_machine(), layout, 7, 6, dtype, eight_bit=kv)
    reference = ReferenceAttention(layout, 7, 6, kv or dtype, torch.device("cpu"))
    rng = np.random.default_rng(0)
    pages = range(7)
    slots = rng.permutation(7 * page_size)
    for layer in range(4):
        sizes = 10.0 ** rng.uniform(-5, 1, (2, len(slots), 3, 16))  # some below the smallest normal number of fp8
        keys, values = (torch.from_numpy(rng.normal(size=part.shape) * part).float() for part in sizes)
        keys[0], values[0, 1], keys[0, 2, 3] = 0.0, 1e-30, -3e4
        shape = StepShape(
            np.array([[0, 0, len(slots)]], np.int32),
            np.arange(len(slots)),
            np.stack([slots, slots]),
            np.zeros((2, 1, 99), np.int32),
            np.zeros(1, np.int64),
        )
        for attention in (kernels, reference):
            attention.write(layer, keys, values, attention.plan(shape))
    everything = exported(reference, pages)
    assert torch.equal(exported(kernels, pages), everything)
    kernels.copy(np.array([[5, 0], [3, 6]], np.int32))
    assert torch.equal(exported(kernels, pages), everything[[5, 1, 2, 3, 4, 5, 3]])
    imported(kernels, [6, 0], everything[[6, 0]])
    assert torch.equal(exported(kernels, pages), everything)
    for attention in (kernels, reference):
        attention.poison(np.array([2], np.int32))
    assert torch.equal(exported(kernels, [2]), exported(reference, [2]))
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(exported(kernels, others), everything[others])


def written_reference(page_size: int, dtype: str) -> ReferenceAttention:
    """Three layers on seven pages, all written."""
    layout = KVLayout.uniform(((0, 1, 2),), kv_heads=2, head_dim=4, page_size=page_size, **sizes_of(dtype))
    attention = ReferenceAttention(layout, 7, 2, dtype, torch.device("cpu"))
    places = attention.pool.places(0, np.arange(7 * page_size))
    for layer in range(3):
        attention.pool.write(layer, places, *(torch.randn(7 * page_size, 2, 4) for _ in range(2)))
    return attention


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_poison_fills_exactly_the_given_pages(dtype: str) -> None:
    attention = written_reference(3, dtype)
    before, places = exported(attention, range(7)), attention.pool.places(0, np.arange(7 * 3))
    attention.poison(np.array([1, 4], np.int32))
    attention.poison(np.empty(0, np.int32))
    expected = torch.zeros(7, 3, dtype=torch.bool)
    expected[[1, 4]] = True
    for layer in range(3):
        for part in attention.pool.read(layer, places):
            assert torch.equal(part.isnan(), expected.view(1, -1, 1).expand(part.shape))
    assert torch.equal(exported(attention, [0, 2, 3, 5, 6]), before[[0, 2, 3, 5, 6]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_copy_copies_exactly_the_given_pages(page_size: int, dtype: str) -> None:
    """In K and in V, in all layers, with the scales where there are some."""
    attention = written_reference(page_size, dtype)
    before = exported(attention, range(7))
    attention.copy(np.array([[5, 0], [5, 2], [3, 6]], np.int32))
    assert torch.equal(exported(attention, range(7)), before[[5, 1, 5, 3, 4, 5, 3]])
    assert not torch.equal(exported(attention, range(7)), before)
    attention.copy(np.empty((0, 2), np.int32))


@pytest.mark.parametrize(
    "case",
    [Case((), 2, page_size=4), Case((), 3, head_dim=16, kernels=True)]
    + [Case((), 3, head_dim=32, kernels=True, dtype="bfloat16", page_size=size) for size in (7, 16)]
    + [Case((), 3, head_dim=32, latent=16, kernels=True, page_size=size) for size in (7, 16)]
    + [Case((), 3, head_dim=16, kernels=True, kv=kv, page_size=size) for kv in EIGHT_BIT for size in (7, 16)],
)
@pytest.mark.parametrize("parts", ["keys", "values", "both"])
def test_nan_of_one_sequence_stays_in_it(case: Case, parts: str) -> None:
    pool = Pool(replace(case, lengths=((0, 20), (0, 33), (0, 5))))
    slices = [(0, 0, 20), (1, 0, 33), (2, 0, 5)]
    healthy = pool.step(slices)
    if parts != "keys":
        pool.values[1][7] = torch.nan
    if parts != "values":
        pool.keys[1][7] = torch.nan
    sick = pool.step(slices)
    assert torch.equal(sick[0], healthy[0])
    assert torch.equal(sick[2], healthy[2])
    assert sick[1][7:].isnan().all()


@pytest.mark.parametrize("case", [Case((), 1, 1, 4), Case((), 1, 1, 16, kernels=True)])
def test_large_scores_do_not_overflow(case: Case) -> None:
    """exp of these scores overflows float32 unless the running maximum is taken off first."""
    pool = Pool(replace(case, lengths=((0, 140),)))
    pool.keys[0] *= 100
    (output,) = pool.step([(0, 0, 140)])
    expected = plain_attention(
        *(tensor[0].double().numpy() for tensor in (pool.queries, pool.keys, pool.values)), start=0
    )
    np.testing.assert_allclose(output.double().numpy(), expected, atol=1e-3)
