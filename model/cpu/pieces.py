"""Divides the attention of a step into pieces of work for the kernels of the CPU."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.attention import sharing
from model.attention.backend import StepShape
from model.attention.visible_keys import VisibleKeys
from model.cpu.kernels.attention import CHUNK, LISTED, PIECE
from model.cpu.kernels.kv import BLOCK

Ints = NDArray[np.int64]

NO_PIECES, NOT_DIVIDED = np.empty((0, len(PIECE)), np.int64), np.empty((0, 3), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of a step's attention, as `model.cpu.kernels.attention` reads them.

    Attributes:
        single: [n, fields of PIECE] int64. Pieces of one token.
        several: [n, fields of PIECE] int64. Pieces of at most as many tokens as a kernel takes at once.
        divided: [n, 3] int64. Tokens whose keys are divided, see `model.cpu.kernels.mixing.write_join`.
        lists: Arrays [tokens, LISTED] int64 whose addresses the pieces of several tokens hold.
        parts: The number of partial results.
    """

    single: Ints
    several: Ints
    divided: Ints
    lists: tuple[Ints, ...] = ()
    parts: int = 0


def divide(
    shape: StepShape, seen: VisibleKeys, table: NDArray[np.int32], page_size: int, kv_heads: int, tokens: int,
    threads: int,
) -> Pieces:  # fmt: skip
    """Divides a layer group's attention.

    Pieces that take longest come first. A sequence's keys are divided where pieces are too few for the threads, or one
    is more work than a thread's share. If they are still too few, heads are divided. Chunks that several decodes have
    in common are pieces of all of them.

    Args:
        shape: The step.
        seen: Keys that each token sees.
        table: [rows, width] int32. Page ids of the group. Pieces hold addresses in it.
        page_size: Tokens of a page.
        kv_heads: The number of KV heads.
        tokens: Most tokens of a piece.
        threads: Threads that share the pieces.
    """
    row, _, count = shape.slices.astype(np.int64).T
    packed = np.cumsum(count) - count  # place of each slice's first token
    address = table.ctypes.data + row * table.strides[0]
    alone, several, lists = count == 1, NO_PIECES, list[Ints]()
    if np.count_nonzero(alone) < len(alone):
        every = np.stack((np.arange(count.sum()), np.full(count.sum(), -1)), axis=1)
        tiles = _tiles(address[~alone], packed[~alone], count[~alone], seen, tokens)
        tiles[:, 1] = every.ctypes.data + tiles[:, 1] * (8 * LISTED)
        several, lists = _by_heads(tiles, kv_heads), [every]
        row, address, packed = row[alone], address[alone], packed[alone]
    single = _pieces(address, packed, np.ones_like(packed), seen, kv_heads)
    wanted = 2 * threads
    few = len(single) + len(several) < wanted
    share = 0 if few else (int(single[:, 6].sum()) + int(several[:, 6].sum()) // kv_heads) // wanted  # in blocks
    nodes = _nodes(table, row, single, page_size)
    single, divided = _by_chunks(single, share, nodes)
    if nodes:
        common, listed = _common_pieces(nodes, address, packed, divided, tokens)
        several, lists = np.concatenate((several, _by_heads(common, kv_heads))), [*lists, listed]
    if len(single) + len(several) < wanted:
        single = _by_heads(single, kv_heads)
    parts = int(divided[-1, 1:].sum()) if len(divided) else 0
    return Pieces(_longest_first(single), _longest_first(several), divided, tuple(lists), parts)


def _nodes(table: NDArray[np.int32], row: Ints, single: Ints, page_size: int) -> list[sharing.Node]:
    """Finds keys in common of decodes that see all earlier keys. Members of nodes are indices of pieces in `single`."""
    if len(single) < sharing.SHARERS or int(single[:, 6].max()) <= CHUNK:
        return []
    whole = np.flatnonzero(single[:, 5] == 0)
    if len(whole) < sharing.SHARERS:
        return []
    # The last block may not be full. Nothing of its chunk is shared.
    ends = single[whole, 6] * BLOCK
    tables = table[row[whole], : -(-int(ends.max()) // page_size)]
    found = sharing.shared_nodes(tables, ends, page_size, CHUNK * BLOCK)
    return [sharing.Node(whole[node.members], node.first, node.last) for node in found]


def _common_pieces(
    nodes: list[sharing.Node], address: Ints, packed: Ints, divided: Ints, tokens: int
) -> tuple[Ints, Ints]:  # fmt: skip
    """Returns pieces for each chunk in common and as many members as a piece takes, with their lists (see LISTED)."""
    part_of = np.zeros(int(packed[-1]) + 1, np.int64)
    part_of[divided[:, 0]] = divided[:, 1]
    made, lists, at = list[Ints](), list[Ints](), 0
    for node in nodes:
        mine, chunks = packed[node.members], np.arange(node.first, node.last)
        listed = np.empty((len(chunks), len(mine), LISTED), np.int64)
        listed[..., 0], listed[..., 1] = mine, part_of[mine] + chunks[:, None]
        starts = np.arange(0, len(mine), tokens)
        pieces = np.zeros((len(chunks), len(starts), len(PIECE)), np.int64)
        pieces[..., 0], pieces[..., 2] = address[node.members[starts]], np.minimum(tokens, len(mine) - starts)
        pieces[..., 1] = at + np.arange(len(chunks))[:, None] * len(mine) + starts
        pieces[..., 4], pieces[..., 5], pieces[..., 6] = 1, chunks[:, None] * CHUNK, CHUNK
        made.append(pieces.reshape(-1, len(PIECE)))
        lists.append(listed.reshape(-1, LISTED))
        at += listed.shape[0] * listed.shape[1]
    every, all_pieces = np.concatenate(lists), np.concatenate(made)
    all_pieces[:, 1] = every.ctypes.data + all_pieces[:, 1] * (8 * LISTED)
    return all_pieces, every


def _pieces(address: Ints, token: Ints, tokens: Ints, seen: VisibleKeys, kv_heads: int) -> Ints:
    """Makes a piece for each slice or tile.

    The first token's first key and the last token's last key bound it: both grow with the token's position.
    """
    made = np.empty((len(token), len(PIECE)), np.int64)
    block = seen.first[token].astype(np.int64) // BLOCK
    end = -(-seen.last[token + tokens - 1].astype(np.int64) // BLOCK)
    for column, values in enumerate((address, token, tokens, 0, kv_heads, block, end - block, -1)):
        made[:, column] = values
    return made


def _tiles(address: Ints, token: Ints, count: Ints, seen: VisibleKeys, tokens: int) -> Ints:
    """Cuts slices into tiles of at most `tokens` tokens."""
    tiles = -(-count // tokens)
    owner = np.repeat(np.arange(len(count)), tiles)
    number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = token[owner] + number * tokens
    here = np.minimum(tokens, token[owner] + count[owner] - first)
    return _pieces(address[owner], first, here, seen, 1)


def _by_heads(pieces: Ints, kv_heads: int) -> Ints:
    """Divides each piece into one for each KV head."""
    made = pieces.repeat(kv_heads, axis=0)
    made[:, 3], made[:, 4] = np.tile(np.arange(kv_heads), len(pieces)), 1
    return made


def _by_chunks(pieces: Ints, share: int, nodes: list[sharing.Node]) -> tuple[Ints, Ints]:
    """Divides pieces of more than `share` blocks into one for each chunk, each with a partial result of its own.

    Members of nodes are divided too, without the chunks that they have in common.

    Returns:
        The pieces, and the tokens whose keys are divided, [n, 3].
    """
    first, end = pieces[:, 5] // CHUNK, -(-(pieces[:, 5] + pieces[:, 6]) // CHUNK)
    chunks, common = end - first, np.zeros(len(pieces), np.int64)
    for node in nodes:
        common[node.members] = node.last
    long = ((chunks > 1) & (pieces[:, 6] > share)) | (common > 0)
    if not np.count_nonzero(long):
        return pieces, NOT_DIVIDED
    which, chunks, common = pieces[long], chunks[long], common[long]
    parts, left = np.cumsum(chunks) - chunks, chunks - common
    owner = np.repeat(np.arange(len(which)), left)
    nth = np.arange(len(owner)) - (np.cumsum(left) - left)[owner] + common[owner]
    cut, bound = which[owner], (first[long][owner] + nth) * CHUNK
    cut[:, 5] = np.maximum(which[owner, 5], bound)
    cut[:, 6] = np.minimum(which[owner, 5] + which[owner, 6], bound + CHUNK) - cut[:, 5]
    cut[:, 7] = parts[owner] + nth
    return np.concatenate((pieces[~long], cut)), np.stack((which[:, 1], parts, chunks), axis=1)


def _longest_first(pieces: Ints) -> Ints:
    return pieces if len(pieces) < 2 else pieces[np.argsort(-pieces[:, 6], kind="stable")]
