"""Makes pieces of work for keys that several decodes share, see `model.attention.sharing`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.attention.sharing import Node, shared_nodes
from model.gpu.attention import FIELDS

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Pieces for shared keys.

    Attributes:
        pieces: [n, FIELDS] int64, see `attend_pieces`.
        order: int64. The pieces' lists of tokens.
        chunks: [tokens] int64. Chunks of each token, from its first key on, that these pieces compute.
    """

    pieces: Ints
    order: Ints
    chunks: Ints

    @staticmethod
    def none() -> "Shared":
        empty = np.empty(0, np.int64)
        return Shared(np.empty((0, FIELDS.value), np.int64), empty, empty)


def find_shared(
    tokens: Ints, lines: Ints, ends: Ints, pages: NDArray[np.int32], width: int, page_size: int, chunk: int,
    at_once: int, count: int,
) -> Shared:  # fmt: skip
    """Makes the pieces for keys that several tokens share.

    Args:
        tokens: [n] int64. Tokens of sequences with one token each, which see all keys from 0 on.
        lines: [n] int64. Place of each sequence's page table in `pages`.
        ends: [n] int64. Key after the last that each token sees.
        pages: int32. Page tables, one after the other.
        width: Pages in a page table.
        page_size: Tokens of a page.
        chunk: Keys of a piece.
        at_once: Most tokens of a piece.
        count: Tokens of the step.
    """
    if not len(tokens):
        return Shared.none()
    columns = np.arange(min(width, -(-int(ends.max()) // page_size)))
    pieces, orders, chunks, at = list[Ints](), list[Ints](), np.zeros(count, np.int64), count
    for node in shared_nodes(pages[lines[:, None] + columns], ends, page_size, chunk):
        mine = tokens[node.members]
        orders.append(mine)
        chunks[mine] = node.last
        pieces.append(_pieces_of(node, int(lines[node.members[0]]), at, chunk, at_once))
        at += len(mine)
    if not pieces:
        return Shared.none()
    return Shared(np.concatenate(pieces), np.concatenate(orders), chunks)


def _pieces_of(node: Node, line: int, place: int, chunk: int, at_once: int) -> Ints:
    """Makes a node's pieces; `place` is that of the list of its tokens."""
    begins = np.arange(0, len(node.members), at_once)
    numbers = np.arange(node.first, node.last)
    made = np.zeros((len(numbers), len(begins), FIELDS.value), np.int64)
    made[..., 0], made[..., 1] = line, place + begins
    made[..., 2] = np.minimum(at_once, len(node.members) - begins)
    made[..., 3], made[..., 4], made[..., 5] = (
        part[:, None] for part in (numbers * chunk, (numbers + 1) * chunk, numbers)
    )
    return made.reshape(-1, FIELDS.value)
