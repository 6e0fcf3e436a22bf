"""Finds the keys that decodes of a step have on the same pages, as prompts or conversations in common.

Such keys are read once for many decodes (cascade attention: FlashInfer, Ye et al., 2025; RadixAttention's tree, Zheng
et al., 2024).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

SHARERS = 8
"""Least number of sequences for which sharing pays: fewer leave most of a tile empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Sequences that have the same pages in chunks `first` to `last` - 1.

    Attributes:
        members: [n] int64. Indices of the sequences.
        first: First chunk in common.
        last: The chunk after the last one in common.
    """

    members: Ints
    first: int
    last: int


def shared_nodes(tables: NDArray[np.int32], ends: Ints, page: int, chunk: int) -> Iterator[Node]:
    """Finds the nodes of at least SHARERS sequences.

    A part of a node's members may have more in common. They form another node for the chunks after it.

    Args:
        tables: [n, width] int32. Page ids of each sequence.
        ends: [n] int64. Position after the last key that each sequence's token sees; all see from 0 on.
        page: Tokens in a page.
        chunk: Keys that are computed together.

    Yields:
        Nodes, each before those of its parts.
    """
    if len(tables) >= SHARERS:
        # The chunk with the token's own key is never shared, as other sequences have other keys there.
        full = (ends - 1) // chunk
        yield from _nodes(tables, full, np.arange(len(tables)), 0, page, chunk)


def _nodes(tables: NDArray[np.int32], full: Ints, members: Ints, first: int, page: int, chunk: int) -> Iterator[Node]:
    """Yields the nodes among these members, from chunk `first` on."""
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
    """Returns the chunk after the last one in which all of the group have the same pages, at least `first` + 1."""
    most = int(full[group].min())
    same = (tables[group, : most * chunk // page + 1] == tables[group[0], : most * chunk // page + 1]).all(0)
    same[: first * chunk // page] = True
    alike = len(same) if same.all() else int(np.argmin(same))
    return max(first + 1, min(most, alike * page // chunk))
