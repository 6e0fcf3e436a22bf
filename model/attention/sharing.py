"""Which keys of a step's decodes lie on the same pages: what they have in common, prompts or conversations, is read
once for many of them (cascade attention: FlashInfer, Ye et al., 2025; RadixAttention's tree, Zheng et al., 2024).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

SHARERS = 8
"""Sequences from which on it pays: fewer leave most of a tile empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Sequences that have the same pages in chunks first .. last - 1. members: [n] numbers of theirs."""

    members: Ints
    first: int
    last: int


def shared_nodes(tables: NDArray[np.int32], ends: Ints, page: int, chunk: int) -> Iterator[Node]:
    """tables: [n, width] page ids of so many tokens each. ends: [n], the position after the last key that each one's
    token sees, all from 0 on. chunk: keys that are computed together. Those that SHARERS or more have in common; who
    has more in common with some comes again in another node, for the chunks after it.
    """
    if len(tables) >= SHARERS:
        full = (ends - 1) // chunk  # chunks without the one with the token's own key
        yield from _nodes(tables, full, np.arange(len(tables)), 0, page, chunk)


def _nodes(tables: NDArray[np.int32], full: Ints, members: Ints, first: int, page: int, chunk: int) -> Iterator[Node]:
    """Of the tree of what these have in common from chunk `first` on."""
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
