"""Recurrent layers in plain torch, over states in the pages of the reference back end's pool.

Token by token, whatever the chunk, so the bits do not depend on how a prompt is cut.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import NONE, StateSegments
from model.attention.recurrence import L2_EPS, LinearRecurrence
from model.layers import silu

Pages = NDArray[np.int32]


class PagedStates:
    """Reads and writes states, unit by unit.

    Args:
        layout: Layout of the pool.
        pages: [pages, page_bytes] uint8. The pool's memory.
    """

    def __init__(self, layout: KVLayout, pages: Tensor) -> None:
        self._pages, self._places = pages, layout.states.places
        self._sizes = {one.layer: one.units for one in layout.recurrent}

    def convolve(
        self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None, activated: bool, segments: StateSegments
    ) -> Tensor:
        """Convolves the tokens of a step, see `StateBackend.convolve`."""
        made, channels, window = torch.empty_like(x), x.shape[1], x
        for here, sources, targets in _each(segments):
            if sources is not None:
                window = self._window(layer, sources, x, taps.shape[1] - 1)
            whole = torch.cat((window.view(-1, channels), x[here]))
            total = whole[: here.stop - here.start] * taps[:, 0]
            for tap in range(1, taps.shape[1]):
                total = total + whole[tap : tap + len(total)] * taps[:, tap]
            total = total if bias is None else total + bias
            made[here], window = silu(total) if activated else total, whole[len(whole) - taps.shape[1] + 1 :]
            if targets[0] != NONE:
                self._write(layer, targets, 0, window.flatten())
        return made

    def recur(self, layer: int, recurrence: LinearRecurrence, segments: StateSegments) -> Tensor:
        """Runs a recurrence over the tokens of a step, see `StateBackend.recur`."""
        r, made, matrix = recurrence, torch.empty_like(recurrence.values), recurrence.values
        heads, rows, columns = r.values.shape[1], r.keys.shape[2], r.values.shape[2]
        for here, sources, targets in _each(segments):
            if sources is not None:
                matrix = self._matrices(layer, sources, r.values, rows * columns).view(heads, rows, columns)
            queries, keys = (_by_head(part[here], heads, r.scale is not None) for part in (r.queries, r.keys))
            queries = queries if r.scale is None else queries * r.scale
            for token in range(here.start, here.stop):
                i, value = token - here.start, r.values[token]
                matrix = matrix * r.kept[token, :, :, None]
                known = (matrix * keys[i, :, :, None]).sum(1) if r.delta else 0.0
                matrix = matrix + keys[i, :, :, None] * ((value - known) * r.rates[token, :, None])[:, None]
                result = (matrix * queries[i, :, :, None]).sum(1)
                made[token] = result if r.skip is None else result + value * r.skip[:, None]
            if targets[0] != NONE:
                for head in range(heads):
                    self._write(layer, targets, 1 + head, matrix[head].flatten())
        return made

    def _window(self, layer: int, pages: Pages, like: Tensor, inputs: int) -> Tensor:
        """Returns the inputs before a segment, [inputs x channels]: zeros before the first tokens of a sequence."""
        if pages[0] == NONE:
            return like.new_zeros(inputs * like.shape[1])
        return self._unit(layer, pages, 0).clone()

    def _matrices(self, layer: int, pages: Pages, like: Tensor, size: int) -> Tensor:
        """Returns the matrices of all heads before a segment, likewise."""
        heads = like.shape[1]
        if pages[0] == NONE:
            return like.new_zeros(heads * size)
        return torch.cat([self._unit(layer, pages, 1 + head) for head in range(heads)])

    def _unit(self, layer: int, pages: Pages, number: int) -> Tensor:
        """Returns a view of a unit of a state, float32."""
        place, size = self._places[layer][number], self._sizes[layer][number]
        return self._pages[int(pages[place.page]), place.offset : place.offset + size].view(torch.float32)

    def _write(self, layer: int, pages: Pages, number: int, unit: Tensor) -> None:
        self._unit(layer, pages, number).copy_(unit)


def _each(segments: StateSegments) -> Iterator[tuple[slice, Pages | None, Pages]]:
    """Yields the tokens of each segment, the pages before it, and those after it.

    None is yielded for the pages before a segment that goes on from the one before.
    """
    for number, (offset, count) in enumerate(zip(segments.offsets.tolist(), segments.counts.tolist(), strict=True)):
        sources = None if segments.follows[number] else segments.sources[:, number]
        yield slice(offset, offset + count), sources, segments.targets[:, number]


def _by_head(x: Tensor, heads: int, normalised: bool) -> Tensor:
    """Repeats queries or keys [tokens, groups, key_dim] for each head that shares them.

    Args:
        x: Queries or keys.
        heads: The number of heads.
        normalised: Whether they are divided by their lengths.
    """
    if normalised:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
    return x.repeat_interleave(heads // x.shape[1], 1)
