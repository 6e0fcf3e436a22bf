"""A forward pass as bytes: rank 0 packs its batch for the followers.

Followers get no plan and keep no rows: all that they keep is in their pages, KV and recurrent states. So these are
ordinary steps to them: one that is run again, in halves or from the start, a probe, a beam search that goes back. The
page tables of the sequences at work are sent each time, 4 bytes a page.

If steps are launched ahead, the inputs of the model go from device to device instead: a token that the step before
draws is not known on the host yet.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.backend import StateSegments, StepShape
from model.forward import ForwardBatch, ImageFeatures
from model.parallel.collective import Collective
from model.parallel.wire import WireError, pack_arrays, unpack_arrays

INT16, INT32, INT64, FLOAT32 = (np.dtype(name) for name in ("<i2", "<i4", "<i8", "<f4"))
LAYOUT = ((INT64, 1), (INT32, 2), (INT64, 1), (INT64, 2), (INT32, 3), (INT64, 1), (INT64, 1))
INPUTS = (INT64, 1), (INT64, 2), (INT64, 1)
STATES, IMAGES = ((INT64, 2), (INT32, 3)), {2: ((INT64, 1), (INT16, 3)), 4: ((INT64, 1), (FLOAT32, 3))}
"""Dtype and dimensions of a step's arrays, and of those that follow where inputs are sent too, where a model has
recurrent layers, and where a step has images, by the bytes of an element of their features, in the order of
`pack_step`. Features of 16 bits are sent as integers: numpy has no bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Inputs of a model in a step, on its device.

    Attributes:
        tokens: [tokens] int64.
        positions: [axes, tokens] int64.
        wanted: [m] int64. Packed offsets of the tokens whose logits are needed.
    """

    tokens: Tensor
    positions: Tensor
    wanted: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass of a follower.

    Attributes:
        sizes: Axes of positions, and the number of tokens whose logits are needed.
        parts: [k] int64. Packed offsets of the tokens whose logits are computed in parts.
        shape: Places of the tokens. Its rows are numbered as its slices.
        inputs: Inputs of the model; None where they go from device to device (`receive_inputs`).
        images: Features of images, None without images.
    """

    sizes: tuple[int, int]
    parts: NDArray[np.int64]
    shape: StepShape
    inputs: StepInputs | None = None
    images: ImageFeatures | None = None


def pack_step(batch: ForwardBatch, shape: StepShape, page_size: int, inputs: bool = True) -> bytes:
    """Packs a batch for the followers.

    Args:
        batch: Tensors on any device.
        shape: Shape of the same step, with rows of any number.
        page_size: Tokens of a page.
        inputs: Whether to pack the inputs of the model too, for which the host waits for the device.
    """
    rows, ends = shape.slices[:, 0], shape.slices[:, 1] + shape.slices[:, 2]
    pages = -(-int(ends.max(initial=0)) // page_size)
    slices = shape.slices.astype(INT32)
    slices[:, 0] = np.arange(len(slices))
    more: list[NDArray] = []
    if inputs:
        more = [one.cpu().numpy() for one in (batch.tokens, batch.positions, batch.wanted)]
    if (segments := shape.segments) is not None:
        runs = np.stack((segments.offsets, segments.counts, segments.follows), axis=1)
        more += [runs.astype(INT64), np.stack((segments.sources, segments.targets)).astype(INT32)]
    if (images := batch.images) is not None:
        features = images.features.contiguous().cpu()
        bits = features.view(torch.int16) if features.itemsize == 2 else features
        more += [images.places.cpu().numpy(), bits.numpy()]
    return pack_arrays(
        np.array([len(batch.positions), len(batch.wanted)], INT64), slices, shape.positions.astype(INT64),
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
    kinds, with_inputs = IMAGES[dtype.itemsize], more[: len(INPUTS)] == list(INPUTS)
    at = len(LAYOUT) + len(INPUTS) * with_inputs
    more = more[len(INPUTS) * with_inputs :]
    with_states, with_images = more[:2] == list(STATES), more[-2:] == list(kinds)
    due = LAYOUT + INPUTS * with_inputs + STATES * with_states + kinds * with_images
    if [(array.dtype, array.ndim) for array in arrays] != list(due):
        raise WireError(f"a step has arrays of {[(str(array.dtype), array.ndim) for array in arrays]}")
    sizes, slices, positions, slots, tables, bidirectional, parts = arrays[: len(LAYOUT)]
    _check(len(sizes) == 2 and sizes[0] > 0 and sizes[1] >= 0, "sizes", sizes)
    _check(slices.shape[1] == 3, "slices", slices)
    _check(len(positions) == slots.shape[1] == slices[:, 2].sum(), "positions", positions)
    _check(tables.shape[:2] == (len(slots), len(slices)), "tables", tables)
    _check(len(bidirectional) == len(slices), "bidirectional", bidirectional)
    _check_offsets("parts", parts, len(positions))
    axes, wanted = map(int, sizes)
    inputs = _inputs(arrays[len(LAYOUT) : at], axes, wanted, len(positions), device) if with_inputs else None
    segments = _segments(arrays[at], arrays[at + 1], len(positions)) if with_states else None
    images = None
    if with_images:
        places, features = arrays[-2:]
        _check(len(places) == features.shape[1] and len(features) > 0, "features", features)
        images = ImageFeatures(torch.from_numpy(places).to(device), torch.from_numpy(features).view(dtype).to(device))
    shape = StepShape(slices, positions, slots, tables, bidirectional, segments)
    return Step((axes, wanted), parts, shape, inputs, images)


def _inputs(arrays: list[NDArray[Any]], axes: int, wanted: int, tokens: int, device: torch.device) -> StepInputs:
    """Returns the inputs of the model, on the device. Raises WireError where it does not fit the step's sizes."""
    _check(len(arrays[0]) == tokens, "tokens", arrays[0])
    _check(arrays[1].shape == (axes, tokens), "positions", arrays[1])
    _check(len(arrays[2]) == wanted, "wanted", arrays[2])
    _check_offsets("wanted", arrays[2], tokens)
    return StepInputs(*(torch.from_numpy(array).to(device) for array in arrays))


def send_inputs(collective: Collective, batch: ForwardBatch) -> None:
    """Sends the inputs of the model from rank 0's device to those of the others. Raises RankLost."""
    # Positions come first: kernels read them, and Triton compiles others for an array that is not aligned.
    collective.all_gather(torch.cat((batch.positions.flatten(), batch.tokens, batch.wanted))[None])


def receive_inputs(collective: Collective, step: Step, device: torch.device) -> StepInputs:
    """Receives on a follower what `send_inputs` sends. Raises RankLost."""
    (axes, wanted), tokens = step.sizes, len(step.shape.positions)
    nothing = torch.empty((1, (1 + axes) * tokens + wanted), dtype=torch.int64, device=device)
    positions, ids, offsets = collective.all_gather(nothing)[0, 0].split((axes * tokens, tokens, wanted))
    return StepInputs(ids, positions.view(axes, tokens), offsets)


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


def _check_offsets(name: str, offsets: NDArray[np.int64], tokens: int) -> None:
    _check(bool(((offsets >= 0) & (offsets < tokens)).all()), name, offsets)


def _check(holds: bool, name: str, array: NDArray) -> None:
    if not holds:
        raise WireError(f"the {name} of a step are {list(array.shape)}, or hold what they cannot")
