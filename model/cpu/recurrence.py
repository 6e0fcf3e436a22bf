"""Recurrent layers by kernels: the states in the pool, and the calls of a layer."""

from collections.abc import Callable

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import StateSegments
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.delta import (
    CELLS,
    together,
    write_convolution,
    write_gated_norm,
    write_gates,
    write_recurrence,
)
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.product import NotCompiled
from model.cpu.kernels.program import Call
from model.cpu.kernels.values import LANES
from model.delta_net import GatedDeltaNet

MakeBuffer = Callable[[str, int, Element], Buffer]


class CpuStates:
    """States of recurrent layers in the pages of a pool, and the cells with a step's segments.

    Args:
        layout: Layout of the pool.
        pool: All pages, one after the other, as bytes.
    """

    def __init__(self, layout: KVLayout, pool: Tensor) -> None:
        self.pool, self.page_bytes, self._places = pool, layout.page_bytes, layout.states.places
        self._numbers = np.zeros(len(CELLS), np.int64)
        self._arrays: tuple[np.ndarray, ...] = ()

    def cells(self) -> list[int]:
        """Returns the addresses of the cells, in the order of `CELLS`."""
        return [int(self._numbers.ctypes.data + 8 * i) for i in range(len(CELLS))]

    def begin(self, segments: StateSegments | None) -> None:
        """Sets the cells of a step, and keeps its arrays alive until the next one."""
        if segments is None:
            return
        self._arrays = (
            np.ascontiguousarray(segments.offsets, np.int64),
            np.ascontiguousarray(segments.counts, np.int64),
            np.ascontiguousarray(segments.follows, np.int64),
            np.ascontiguousarray(segments.sources, np.int32),
            np.ascontiguousarray(segments.targets, np.int32),
        )
        self._numbers[:] = len(segments.counts), *(array.ctypes.data for array in self._arrays)

    def places(self, layer: int) -> np.ndarray:
        """Returns [2, units] int64 of a layer: which page of a state has each unit, and at which byte."""
        places = self._places[layer]
        return np.array([[one.page for one in places], [one.offset for one in places]], np.int64)


def recurrence_calls(
    net: GatedDeltaNet, states: CpuStates, rows: int, mixed: Buffer, raw: Buffer, y: Buffer, buffer: MakeBuffer
) -> list[Call]:
    """Returns the calls of a layer between its products.

    Args:
        net: The layer.
        states: States of the layers.
        rows: Address of the cell with the number of rows.
        mixed: Queries, keys, values and output gates, float32.
        raw: Write gates and decays, before their activations, float32.
        y: The result, of the products' element.
        buffer: Returns the buffer of a name, width and element, which all layers share.

    Raises:
        NotCompiled: A size is no multiple of a vector.
    """
    s = net.shape
    for what, size in (("channels", s.channels), ("elements of a key", s.key_dim), ("of a value", s.value_dim)):
        if size % LANES:
            raise NotCompiled(f"a recurrent layer has {size} {what}, no multiple of {LANES}")
    padded, vectors = -(-s.heads // LANES) * LANES, together(s.value_dim)
    convolved, made = buffer("convolved", s.channels, FLOAT), buffer("made by a recurrence", s.values, FLOAT)
    gates, cells = buffer("gates of a recurrence", 2 * padded, FLOAT), states.cells()
    where, pool = states.places(net.number), states.pool
    rate, bias = (F.pad(part, (0, padded - s.heads)) for part in (net.decay, net.bias))
    return [
        Call(
            f"convolution_{s.taps}", write_convolution(s.taps),
            (*cells, mixed.tensor, mixed.stride, net.taps.T.contiguous(), convolved.tensor, convolved.stride,
             s.channels, pool, states.page_bytes, int(where[0, 0]), int(where[1, 0])),
        ),
        Call(
            "delta_gates", write_gates(),
            (rows, raw.tensor, raw.stride, rate, bias, gates.tensor, gates.stride, s.heads, padded),
        ),
        Call(
            f"delta_{s.key_dim}_{vectors}", write_recurrence(s.key_dim, vectors),
            (*cells, convolved.tensor, convolved.stride, gates.tensor, gates.stride, padded, made.tensor, made.stride,
             s.keys, s.heads, s.heads // s.key_heads, s.value_dim, pool, states.page_bytes,
             where[0, 1:].copy(), where[1, 1:].copy(), s.key_dim**-0.5),
        ),
        Call(
            f"gated_norm_{y.element.name}", write_gated_norm(y.element),
            (rows, made.tensor, made.stride, mixed.tensor[:, s.channels :], mixed.stride, net.norm, y.tensor, y.stride,
             s.heads, s.value_dim, net.eps),
        ),
    ]  # fmt: skip
