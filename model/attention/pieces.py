"""How the attention of a step is divided into pieces of work for the kernels of the CPU."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.attention.backend import StepShape
from model.attention.seen import Seen
from model.kernels.attention import CHUNK, PIECE
from model.kernels.kv import BLOCK

Ints = NDArray[np.int64]

NO_PIECES, NOT_DIVIDED = np.empty((0, len(PIECE)), np.int64), np.empty((0, 3), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """single: of one token. several: of up to as many tokens as a kernel takes at once. Int64 [n, fields of PIECE].
    divided: tokens whose keys were divided, see `model.kernels.attention.write_join`.
    """

    single: Ints
    several: Ints
    divided: Ints


def divide(shape: StepShape, seen: Seen, table: NDArray[np.int32], kv_heads: int, tokens: int, threads: int) -> Pieces:
    """table: of the group, int32 [rows, width], whose addresses the pieces hold. tokens: of a piece, at most.

    Pieces that take longest come first. Where there are fewer than the threads can use, or one is more work than a
    thread's share, its sequence is divided; where there are still too few, heads are.
    """
    row, _, count = shape.slices.astype(np.int64).T
    packed = np.cumsum(count) - count  # of each slice's first token
    address = table.ctypes.data + row * table.strides[0]
    alone, several = count == 1, NO_PIECES
    if np.count_nonzero(alone) < len(alone):
        several = _by_heads(_tiles(address[~alone], packed[~alone], count[~alone], seen, tokens), kv_heads)
        address, packed = address[alone], packed[alone]
    single = _pieces(address, packed, np.ones_like(packed), seen, kv_heads)
    wanted = 2 * threads
    few = len(single) + len(several) < wanted
    share = 0 if few else (int(single[:, 6].sum()) + int(several[:, 6].sum()) // kv_heads) // wanted  # in blocks
    single, divided = _by_chunks(single, share)
    if len(single) + len(several) < wanted:
        single = _by_heads(single, kv_heads)
    return Pieces(_longest_first(single), _longest_first(several), divided)


def _pieces(address: Ints, token: Ints, tokens: Ints, seen: Seen, kv_heads: int) -> Ints:
    """No later token of a slice sees a key before the first that an earlier one sees, or less far."""
    made = np.empty((len(token), len(PIECE)), np.int64)
    block = seen.first[token].astype(np.int64) // BLOCK
    end = -(-seen.last[token + tokens - 1].astype(np.int64) // BLOCK)
    for column, values in enumerate((address, token, tokens, 0, kv_heads, block, end - block, -1)):
        made[:, column] = values
    return made


def _tiles(address: Ints, token: Ints, count: Ints, seen: Seen, tokens: int) -> Ints:
    """Slices cut into tiles."""
    tiles = -(-count // tokens)
    owner = np.repeat(np.arange(len(count)), tiles)
    number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = token[owner] + number * tokens
    here = np.minimum(tokens, token[owner] + count[owner] - first)
    return _pieces(address[owner], first, here, seen, 1)


def _by_heads(pieces: Ints, kv_heads: int) -> Ints:
    made = pieces.repeat(kv_heads, axis=0)
    made[:, 3], made[:, 4] = np.tile(np.arange(kv_heads), len(pieces)), 1
    return made


def _by_chunks(pieces: Ints, share: int) -> tuple[Ints, Ints]:
    """Pieces of more blocks than `share` whose keys are in several chunks become one a chunk, each with a part of the
    result of its own.
    """
    first, end = pieces[:, 5] // CHUNK, -(-(pieces[:, 5] + pieces[:, 6]) // CHUNK)
    chunks = end - first
    long = (chunks > 1) & (pieces[:, 6] > share)
    if not np.count_nonzero(long):
        return pieces, NOT_DIVIDED
    made, divided, parts = [pieces[~long]], [], 0
    for piece, start, n in zip(pieces[long], first[long].tolist(), chunks[long].tolist(), strict=True):
        cut = piece[None].repeat(n, axis=0)
        bounds = np.clip(np.arange(start, start + n + 1) * CHUNK, piece[5], piece[5] + piece[6])
        cut[:, 5], cut[:, 6], cut[:, 7] = bounds[:-1], np.diff(bounds), np.arange(parts, parts + n)
        made.append(cut)
        divided.append((piece[1], parts, n))
        parts += n
    return np.concatenate(made), np.array(divided, np.int64).reshape(-1, 3)


def _longest_first(pieces: Ints) -> Ints:
    return pieces if len(pieces) < 2 else pieces[np.argsort(-pieces[:, 6], kind="stable")]
