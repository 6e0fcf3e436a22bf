"""Which keys of a step's decodes lie on the same pages: what they have in common, prompts or conversations, is read
once for many of them (cascade attention: FlashInfer, Ye et al., 2025; RadixAttention's tree, Zheng et al., 2024).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.gpu.attention import FIELDS

Ints = NDArray[np.int64]

SHARERS = 8
"""Sequences from which on it pays: fewer leave most of a tile empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """pieces: int64 [n, FIELDS], see `attend_pieces`. order: int64, their lists of tokens. chunks: int64 [tokens], of
    each, from its first key on, that these pieces have.
    """

    pieces: Ints
    order: Ints
    chunks: Ints

    @staticmethod
    def none() -> "Shared":
        empty = np.empty(0, np.int64)
        return Shared(np.empty((0, FIELDS.value), np.int64), empty, empty)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Sequences that have the same pages in chunks first .. last - 1. members: [n] numbers of theirs."""

    members: Ints
    first: int
    last: int


def find_shared(
    tokens: Ints, lines: Ints, ends: Ints, pages: NDArray[np.int32], width: int, page_size: int, chunk: int,
    at_once: int, count: int,
) -> Shared:  # fmt: skip
    """tokens: [n] of sequences that have one each in this step and see all keys from 0 to before `ends`. lines: where
    their page tables, of `width`, begin in `pages`. chunk: keys of a piece. at_once: tokens of a piece at most. count:
    tokens of the step.
    """
    if len(tokens) < SHARERS:
        return Shared.none()
    columns = np.arange(min(width, -(-int(ends.max()) // page_size)))
    tables = pages[lines[:, None] + columns]
    full = (ends - 1) // chunk  # not the one with its own key
    pieces, orders, chunks, at = list[Ints](), list[Ints](), np.zeros(count, np.int64), count
    for node in _nodes(tables, full, np.arange(len(tokens)), 0, page_size, chunk):
        mine = tokens[node.members]
        orders.append(mine)
        chunks[mine] = node.last
        pieces.append(_pieces_of(node, int(lines[node.members[0]]), at, chunk, at_once))
        at += len(mine)
    if not pieces:
        return Shared.none()
    return Shared(np.concatenate(pieces), np.concatenate(orders), chunks)


def _nodes(tables: NDArray[np.int32], full: Ints, members: Ints, first: int, page: int, chunk: int) -> Iterator[Node]:
    """Of the tree of what these have in common from chunk `first` on, SHARERS or more of them."""
    members = members[full[members] > first]
    if len(members) < SHARERS:
        return
    column = ((first + 1) * chunk - 1) // page
    order = members[np.argsort(tables[members, column], kind="stable")]
    mine = tables[order, first * chunk // page : column + 1]
    starts = np.flatnonzero(np.concatenate(([True], (mine[1:] != mine[:-1]).any(1))))
    for group in np.split(order, starts[1:]):
        if len(group) >= SHARERS:
            last = _common(tables, full, group, first, page, chunk)
            yield Node(group, first, last)
            yield from _nodes(tables, full, group, last, page, chunk)


def _common(tables: NDArray[np.int32], full: Ints, group: Ints, first: int, page: int, chunk: int) -> int:
    """The chunk before which all of the group have the same pages, from `first` on, which is after it at least."""
    most = int(full[group].min())
    same = (tables[group, : most * chunk // page + 1] == tables[group[0], : most * chunk // page + 1]).all(0)
    same[: first * chunk // page] = True
    alike = len(same) if same.all() else int(np.argmin(same))
    return max(first + 1, min(most, alike * page // chunk))


def _pieces_of(node: Node, line: int, place: int, chunk: int, at_once: int) -> Ints:
    """place: where the list of the node's tokens begins."""
    begins = np.arange(0, len(node.members), at_once)
    numbers = np.arange(node.first, node.last)
    made = np.zeros((len(numbers), len(begins), FIELDS.value), np.int64)
    made[..., 0], made[..., 1] = line, place + begins
    made[..., 2] = np.minimum(at_once, len(node.members) - begins)
    made[..., 3], made[..., 4], made[..., 5] = (
        part[:, None] for part in (numbers * chunk, (numbers + 1) * chunk, numbers)
    )
    return made.reshape(-1, FIELDS.value)
