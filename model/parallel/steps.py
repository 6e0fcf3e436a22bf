"""A forward pass as bytes: rank 0 packs its batch for the followers.

Followers get no plan and keep no rows: all that they keep is in their pages, KV and recurrent states. So these are
ordinary steps to them: one that is run again, in halves or from the start, a probe, a beam search that goes back. The
page tables of the sequences at work are sent each time, 4 bytes a page.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model.attention.backend import StateSegments, StepShape
from model.forward import ForwardBatch, ImageFeatures
from model.parallel.wire import WireError, pack_arrays, unpack_arrays

INT16, INT32, INT64, FLOAT32 = (np.dtype(name) for name in ("<i2", "<i4", "<i8", "<f4"))
LAYOUT = ((INT64, 1), (INT64, 1), (INT32, 2), (INT64, 2), (INT64, 2), (INT32, 3), (INT64, 1), (INT64, 1))
STATES, IMAGES = ((INT64, 2), (INT32, 3)), {2: ((INT64, 1), (INT16, 3)), 4: ((INT64, 1), (FLOAT32, 3))}
"""Dtype and dimensions of a step's arrays, and of those that follow where a model has recurrent layers and where a step
has images, by the bytes of an element of their features, in the order of `pack_step`. Features of 16 bits are sent as
integers: numpy has no bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass of a follower.

    Attributes:
        tokens: [tokens] int64.
        positions: [axes, tokens] int64.
        wanted: [m] int64. Packed offsets of the tokens whose logits are needed.
        parts: [k] int64. Those of the tokens whose logits are computed in parts.
        shape: Places of the tokens. Its rows are numbered as its slices.
        images: Features of images, None without images.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    wanted: NDArray[np.int64]
    parts: NDArray[np.int64]
    shape: StepShape
    images: ImageFeatures | None = None


def pack_step(batch: ForwardBatch, shape: StepShape, page_size: int) -> bytes:
    """Packs a batch for the followers.

    Args:
        batch: Tensors on any device.
        shape: Shape of the same step, with rows of any number.
        page_size: Tokens of a page.
    """
    rows, ends = shape.slices[:, 0], shape.slices[:, 1] + shape.slices[:, 2]
    pages = -(-int(ends.max(initial=0)) // page_size)
    slices = shape.slices.astype(INT32)
    slices[:, 0] = np.arange(len(slices))
    more: list[NDArray] = []
    if (segments := shape.segments) is not None:
        runs = np.stack((segments.offsets, segments.counts, segments.follows), axis=1)
        more = [runs.astype(INT64), np.stack((segments.sources, segments.targets)).astype(INT32)]
    if (images := batch.images) is not None:
        features = images.features.contiguous().cpu()
        bits = features.view(torch.int16) if features.itemsize == 2 else features
        more += [images.places.cpu().numpy(), bits.numpy()]
    return pack_arrays(
        batch.tokens.cpu().numpy(), batch.wanted.cpu().numpy(), slices, batch.positions.cpu().numpy(),
        shape.slots.astype(INT64), shape.tables[:, rows, :pages].astype(INT32), shape.bidirectional.astype(INT64),
        np.zeros(0, INT64) if batch.parts is None else batch.parts.wanted.cpu().numpy(), *more,
    )  # fmt: skip


def unpack_step(content: bytearray, dtype: torch.dtype, device: torch.device) -> Step:
    """Unpacks a step.

    Args:
        content: Bytes of `pack_step`.
        dtype: Type of the features of images, rank 0's too.
        device: Device of the features.

    Raises:
        WireError: The arrays are not those of a step, or do not fit together.
    """
    arrays = unpack_arrays(content)
    more = [(array.dtype, array.ndim) for array in arrays[len(LAYOUT) :]]
    kinds = IMAGES[dtype.itemsize]
    with_states, with_images = more[:2] == list(STATES), more[-2:] == list(kinds)
    due = LAYOUT + STATES * with_states + kinds * with_images
    if [(array.dtype, array.ndim) for array in arrays] != list(due):
        raise WireError(f"a step has arrays of {[(str(array.dtype), array.ndim) for array in arrays]}")
    tokens, wanted, slices, positions, slots, tables, bidirectional, parts = arrays[: len(LAYOUT)]
    _check(slices.shape[1] == 3, "slices", slices)
    _check(positions.shape[1] == len(tokens) == slots.shape[1] == slices[:, 2].sum(), "positions", positions)
    _check(tables.shape[:2] == (len(slots), len(slices)), "tables", tables)
    _check(len(positions) > 0, "positions", positions)
    _check(len(bidirectional) == len(slices), "bidirectional", bidirectional)
    for name, offsets in (("wanted", wanted), ("parts", parts)):
        _check(bool(((offsets >= 0) & (offsets < len(tokens))).all()), name, offsets)
    segments = _segments(arrays[len(LAYOUT)], arrays[len(LAYOUT) + 1], len(tokens)) if with_states else None
    images = None
    if with_images:
        places, features = arrays[-2:]
        _check(len(places) == features.shape[1] and len(features) > 0, "features", features)
        images = ImageFeatures(torch.from_numpy(places).to(device), torch.from_numpy(features).view(dtype).to(device))
    shape = StepShape(slices, positions[0], slots, tables, bidirectional, segments)
    return Step(tokens, positions, wanted, parts, shape, images)


def _segments(runs: NDArray[np.int64], states: NDArray[np.int32], tokens: int) -> StateSegments:
    """Returns the segments of a step. Raises WireError unless they are whole, and all tokens are in them."""
    _check(runs.shape[1] == 3, "segments", runs)
    offsets, counts, follows = runs.T
    behind = np.cumsum(counts) - counts
    _check(bool((counts > 0).all() and (offsets == behind).all() and counts.sum() == tokens), "segments", runs)
    _check(len(states) == 2 and states.shape[2] == len(runs), "states", states)
    return StateSegments(offsets, counts, states[0], states[1], follows.astype(np.bool_))


def unpack_moves(content: bytearray, width: int) -> NDArray[np.int32]:
    """Unpacks page moves.

    Returns:
        [n, width] int32, or [n] for a width of 1.

    Raises:
        WireError: The bytes are something else.
    """
    arrays = unpack_arrays(content)
    if len(arrays) != 1 or arrays[0].dtype != INT32 or arrays[0].shape[1:] != ((width,) if width > 1 else ()):
        raise WireError(f"pages are {[array.shape for array in arrays]}, {width} columns are due")
    return arrays[0]


def _check(holds: bool, name: str, array: NDArray) -> None:
    if not holds:
        raise WireError(f"the {name} of a step are {list(array.shape)}, or hold what they cannot")
