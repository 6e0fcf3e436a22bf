"""Divides the attention of a step into pieces of work for the kernel of `model.gpu.attention`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from model.attention.visible_keys import VisibleKeys
from model.gpu.attention import FIELDS, JOIN_FIELDS
from model.gpu.sharing import Shared, find_shared
from model.gpu.tuning import FILLING, TileSizes, Tuning

Ints = NDArray[np.int64]

FEW, SOME, MANY, SHARED = range(4)
"""Kinds of pieces, by the tokens of their sequence in the step; and those of keys that several sequences share."""
NO_PIECES: Ints = np.empty((0, FIELDS.value), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchKind:
    """Pieces that one launch computes.

    Attributes:
        kind: Kind of the pieces, from FEW to SHARED.
        sizes: Tile sizes of the kernel.
        divided: Whether pieces may be chunks of keys.
        looped: Whether programs may share pieces, as graphs need it.
        pieces: [n, FIELDS] int64, see `attend_pieces`. Places of tokens count from the beginning of `Division.order`.
    """

    kind: int
    sizes: TileSizes
    divided: bool
    looped: bool
    pieces: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Launches whose partial results fit at one time.

    Attributes:
        kinds: Launches.
        joins: [m, JOIN_FIELDS] int64, see `join_parts`.
        parts: The number of partial results.
    """

    kinds: tuple[LaunchKind, ...]
    joins: Ints
    parts: int


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Pieces of a step's attention for one layer group.

    Attributes:
        order: int64. Lists of tokens, one after the other.
        first_part: [tokens] int64, as in `attend_pieces`.
        rounds: Rounds, in their order.
    """

    order: Ints
    first_part: Ints
    rounds: tuple[Round, ...]

    @staticmethod
    def nothing(tuning: Tuning, kinds: Sequence[int]) -> "Division":
        """Returns the division of a step without tokens, in these launches."""
        only = Round((), np.empty((0, JOIN_FIELDS.value), np.int64), 0)
        return Division(np.empty(0, np.int64), np.empty(0, np.int64), (only,)).in_launches(tuning, kinds)

    def in_launches(self, tuning: Tuning, kinds: Sequence[int]) -> "Division":
        """Returns the same work in one launch each of these kinds, FEW, MANY and SHARED, as graphs have them.

        Raises:
            ValueError: The division has several rounds.
        """
        (only,) = self.rounds
        launches = []
        for kind, sizes in ((FEW, tuning.few), (MANY, tuning.many), (SHARED, tuning.shared)):
            if kind in kinds:
                of = (MANY, SOME) if kind == MANY else (kind,)
                pieces = [launch.pieces for one in of for launch in only.kinds if launch.kind == one]
                launches.append(LaunchKind(kind, sizes, True, True, np.concatenate([NO_PIECES, *pieces])))
        return replace(self, rounds=(replace(only, kinds=tuple(launches)),))


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Neighbouring tokens of a sequence that fill a tile together, as arrays [n].

    Attributes:
        kind: FEW, SOME or MANY.
        line: Place of the sequence's line in the page tables.
        token: First token in the step.
        count: The number of tokens.
        begin: First key.
        end: Key after the last.
        chunk: First chunk of keys.
        chunks: Chunks that the keys are divided into.
    """

    kind: Ints
    line: Ints
    token: Ints
    count: Ints
    begin: Ints
    end: Ints
    chunk: Ints
    chunks: Ints

    @property
    def parts(self) -> Ints:
        """The number of partial results of each span."""
        return np.where(self.chunks > 1, self.chunks * self.count, 0)

    def of(self, which: Ints) -> "Spans":
        """Returns a selection of the spans."""
        return Spans(*(getattr(self, name)[which] for name in self.__slots__))


def divide(
    slices: Ints,
    tokens: int,
    seen: VisibleKeys,
    tables: NDArray[np.int32],
    page_size: int,
    tuning: Tuning,
    tile_heads: int,
    most_parts: int,
) -> Division:
    """Divides the attention of a layer group.

    Args:
        slices: [n, 3] int64. Row, first token, tokens.
        tokens: Tokens of the step, some of which may be in no slice: nothing is computed for them.
        seen: Keys that each token sees.
        tables: [rows, width] int32. Page ids.
        page_size: Tokens of a page.
        tuning: Tile sizes.
        tile_heads: Query heads of a KV head in a tile.
        most_parts: Most partial results of a round, unless one tile of tokens has more.
    """
    spans = _spans(slices, seen, tables.shape[1], tuning, tile_heads)
    bounds = _rounds(spans.parts, most_parts)
    shared = Shared.none()
    if len(bounds) == 2:
        # Keys are shared only where one round holds all partial results.
        alone = np.flatnonzero((spans.kind == FEW) & (spans.count == 1) & (spans.begin == 0))
        pages = tables.reshape(-1)
        shared = find_shared(
            spans.token[alone], spans.line[alone], spans.end[alone], pages, tables.shape[1], page_size,
            tuning.few.chunk, tuning.shared.tokens(tile_heads), tokens,
        )  # fmt: skip
    first_part, rounds = np.zeros(tokens, np.int64), list[Round]()
    for start, stop in itertools.pairwise(bounds):
        mine = spans.of(np.arange(start, stop))
        rounds.append(_round(mine, shared, tuning, first_part))
    return Division(np.concatenate((np.arange(tokens), shared.order)), first_part, tuple(rounds))


def _spans(slices: Ints, seen: VisibleKeys, width: int, tuning: Tuning, tile_heads: int) -> Spans:
    row, token, count = slices.T
    few, many = tuning.few.tokens(tile_heads), tuning.many.tokens(tile_heads)
    kind = np.where(count <= few, FEW, np.where(count < FILLING, SOME, MANY))
    at_once = np.where(kind == FEW, few, many)
    of = -(-count // at_once)
    owner = np.repeat(np.arange(len(slices)), of)
    first = token[owner] + _ranges(of) * at_once[owner]
    here = np.minimum(at_once[owner], token[owner] + count[owner] - first)
    # No later token of a slice sees a key before the first that an earlier one sees, or less far.
    begin, end = seen.first[first].astype(np.int64), seen.last[first + here - 1].astype(np.int64)
    size = np.array([tuning.few.chunk, tuning.many.chunk, 1])[kind[owner]]
    chunk = np.where(kind[owner] < MANY, begin // size, 0)
    chunks = np.where(kind[owner] < MANY, -(-end // size) - chunk, 1)
    return Spans(kind[owner], row[owner].astype(np.int64) * width, first, here, begin, end, chunk, chunks)


def _rounds(parts: Ints, most: int) -> list[int]:
    """Returns the bounds of runs of spans with at most `most` partial results, or of one span."""
    if parts.sum() <= most:
        return [0, len(parts)]
    bounds, held = [0], 0
    for i, n in enumerate(parts.tolist()):
        if held and held + n > most:
            bounds.append(i)
            held = 0
        held += n
    return [*bounds, len(parts)]


def _round(spans: Spans, shared: Shared, tuning: Tuning, first_part: Ints) -> Round:
    """Makes a round, and fills in `first_part` of its tokens."""
    several = np.flatnonzero(spans.chunks > 1)
    span = np.repeat(several, spans.count[several])
    within = _ranges(spans.count[several])
    token, chunks = spans.token[span] + within, spans.chunks[span]
    base = np.cumsum(chunks) - chunks
    first_part[token] = base - spans.chunk[span]
    joins = np.zeros((len(token), JOIN_FIELDS.value), np.int64)
    joins[:, 0], joins[:, 1], joins[:, 2] = token, base, chunks
    kinds = [
        LaunchKind(kind, tuning.few if kind == FEW else tuning.many, kind < MANY, kind == FEW, pieces)
        for kind in np.unique(spans.kind).tolist()
        if len(pieces := _pieces(spans.of(np.flatnonzero(spans.kind == kind)), shared, tuning, kind))
    ]
    if len(shared.pieces):
        kinds.append(LaunchKind(SHARED, tuning.shared, True, True, shared.pieces))
    return Round(tuple(kinds), joins, int(chunks.sum()))


def _pieces(spans: Spans, shared: Shared, tuning: Tuning, kind: int) -> Ints:
    """Makes a piece for each chunk that is not shared, those of most keys first."""
    skipped = shared.chunks[spans.token] if kind == FEW and len(shared.pieces) else np.zeros_like(spans.chunks)
    left = spans.chunks - skipped
    span = np.repeat(np.arange(len(left)), left)
    nth = _ranges(left) + skipped[span]
    made = np.zeros((len(span), FIELDS.value), np.int64)
    made[:, 0], made[:, 1], made[:, 2] = spans.line[span], spans.token[span], spans.count[span]
    made[:, 3], made[:, 4], made[:, 5] = spans.begin[span], spans.end[span], -1
    divided = np.flatnonzero(spans.chunks[span] > 1)
    if len(divided):
        size = tuning.few.chunk if kind == FEW else tuning.many.chunk
        number = spans.chunk[span[divided]] + nth[divided]
        made[divided, 3] = np.maximum(made[divided, 3], number * size)
        made[divided, 4] = np.minimum(made[divided, 4], (number + 1) * size)
        made[divided, 5] = number
    return made[np.argsort(made[:, 3] - made[:, 4], kind="stable")]


def _ranges(counts: Ints) -> Ints:
    """Returns [0 .. c0 - 1, 0 .. c1 - 1, ...] for these counts."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
