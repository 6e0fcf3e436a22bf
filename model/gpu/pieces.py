"""How the attention of a step is divided into pieces of work for the kernel of `model.gpu.attention`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.attention.seen import Seen
from model.gpu.attention import FIELDS, JOIN_FIELDS

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """pieces: int64 [n, FIELDS] and joins: int64 [m, JOIN_FIELDS], as `attend_pieces` and `join_parts` have them.
    parts: how many there are. divided: whether keys were to be.
    """

    pieces: Ints
    joins: Ints
    parts: int
    divided: bool


def divide(slices: Ints, seen: Seen, tokens: int, chunk: int | None) -> Pieces:
    """slices: [n, 3] of row of the page table, first token, tokens. tokens: of a piece, at most. chunk: keys of a part;
    None does not divide them.

    Pieces that take longest come first.
    """
    row, token, count = slices.T
    of = -(-count // tokens)
    owner = np.repeat(np.arange(len(slices)), of)
    number = _ranges(of)
    first = token[owner] + number * tokens
    here = np.minimum(tokens, token[owner] + count[owner] - first)
    # No later token of a slice sees a key before the first that an earlier one sees, or less far.
    begin, end = seen.first[first].astype(np.int64), seen.last[first + here - 1].astype(np.int64)
    chunks = np.ones_like(begin) if chunk is None else -(-end // chunk) - begin // chunk
    parts_of = np.where(chunks > 1, chunks * here, 0)
    base = np.cumsum(parts_of) - parts_of
    piece = np.repeat(np.arange(len(first)), chunks)
    nth = _ranges(chunks)
    made = np.zeros((len(piece), FIELDS.value), np.int64)
    made[:, 0], made[:, 1], made[:, 2] = row[owner[piece]], first[piece], here[piece]
    made[:, 3], made[:, 4] = begin[piece], end[piece]
    if chunk is not None:
        bound = (begin[piece] // chunk + nth) * chunk
        made[:, 3], made[:, 4] = np.maximum(made[:, 3], bound), np.minimum(made[:, 4], bound + chunk)
    made[:, 5] = np.where(chunks[piece] > 1, base[piece] + nth, -1)
    made[:, 6] = chunks[piece]
    longest_first = np.argsort(made[:, 3] - made[:, 4], kind="stable")
    return Pieces(made[longest_first], _joins(first, here, chunks, base), int(parts_of.sum()), chunk is not None)


def _joins(first: Ints, here: Ints, chunks: Ints, base: Ints) -> Ints:
    several = np.flatnonzero(chunks > 1)
    piece = np.repeat(several, here[several])
    within = _ranges(here[several])
    made = np.zeros((len(piece), JOIN_FIELDS.value), np.int64)
    made[:, 0], made[:, 1], made[:, 2] = first[piece] + within, base[piece] + within * chunks[piece], chunks[piece]
    return made


def _ranges(counts: Ints) -> Ints:
    """[0 .. c0 - 1, 0 .. c1 - 1, ...]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
