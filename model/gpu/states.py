"""Recurrent layers on the GPU: kernels over states in the pages of the pool."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.recurrence import L2_EPS, LinearRecurrence
from model.gpu.heads_kind import power_of_two
from model.gpu.kv_pool import KVPool
from model.gpu.recurrence import convolve_pieces, keep_windows, recur_tokens
from model.gpu.state_plan import TILE_TOKENS, StatePlan
from model.recurrent import FLOAT_BYTES, ConvolutionShape, DeltaShape, RecurrentShape, ScanShape

TILE_CHANNELS = 128
TILE_ELEMENTS = 2048  # of a matrix in a program's registers: 64 of each thread of its only warp

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a kernel, and constants that it is compiled with."""

KnownShape = DeltaShape | ScanShape | ConvolutionShape


def why_not(recurrent: Sequence[RecurrentShape | None]) -> str | None:
    """Returns why the kernels cannot compute layers of these shapes, None if they can."""
    unknown = next((one for one in recurrent if not isinstance(one, KnownShape | None)), None)
    return None if unknown is None else f"there are none for recurrent layers of {unknown}"


def tile_values(key_dim: int, value_dim: int) -> int:
    """Returns the columns of a matrix that a program has in registers."""
    return min(max(TILE_ELEMENTS // power_of_two(key_dim), 1), power_of_two(value_dim))


class GpuStates:
    """States of recurrent layers in the pages of a pool.

    Args:
        layout: Layout of the pool.
        pool: The pool.
        device: Its device.
    """

    def __init__(self, layout: KVLayout, pool: KVPool, device: torch.device) -> None:
        self._pool, self._page_stride, self._device = pool.floats, pool.stride // FLOAT_BYTES, device
        self._windows = dict[int, tuple[int, int]]()
        self._units = dict[int, Tensor]()
        for layer, (window, *matrices) in layout.states.places.items():
            self._windows[layer] = window.page, window.offset // FLOAT_BYTES
            places = [[one.page for one in matrices], [one.offset // FLOAT_BYTES for one in matrices]]
            self._units[layer] = torch.tensor(places, dtype=torch.int32, device=device)

    def convolve(
        self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None, activated: bool, plan: StatePlan
    ) -> Tensor:
        """Convolves the tokens of a step, see `StateBackend.convolve`."""
        x, taps = x if x.stride(1) == 1 else x.contiguous(), taps.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        tiles = -(-x.shape[1] // TILE_CHANNELS)
        arguments, options = self._to_convolve(layer, out, x, taps, bias, activated, plan)
        convolve_pieces[(len(plan.pieces), tiles)](*arguments, **options)
        arguments, options = self._to_keep(layer, x, taps, plan)
        keep_windows[(len(plan.runs), tiles)](*arguments, **options)
        return out

    def recur(self, layer: int, recurrence: LinearRecurrence, plan: StatePlan) -> Tensor:
        """Runs a recurrence over the tokens of a step, see `StateBackend.recur`."""
        out = torch.empty(recurrence.values.shape, dtype=torch.float32, device=recurrence.values.device)
        arguments, options = self._to_recur(layer, out, recurrence, plan)
        grid = len(plan.runs), options["HEADS"], -(-options["VALUE_DIM"] // options["TILE_VALUES"])
        recur_tokens[grid](*arguments, **options)
        return out

    def prepared(self, layer: int, shape: RecurrentShape) -> list[Any]:
        """Compiles the kernels of a layer of this shape. Raises TypeError for one without kernels."""
        if not isinstance(shape, KnownShape):
            raise TypeError(f"there are no kernels for {shape}")
        rows = torch.empty((0, 1), dtype=torch.int32, device=self._device)
        plan, made = StatePlan(rows, rows, rows, rows, rows), list[Any]()
        channels, activated, biases = _convolutions_of(shape)
        x, taps, bias = self._nothing(channels), self._empty(channels, shape.taps), self._empty(channels)
        for biased in biases:
            arguments, options = self._to_convolve(layer, x, x, taps, bias if biased else None, activated, plan)
            made.append(convolve_pieces.warmup(*arguments, grid=(1, 1), **options))
        arguments, options = self._to_keep(layer, x, taps, plan)
        made.append(keep_windows.warmup(*arguments, grid=(1, 1), **options))
        if not isinstance(shape, ConvolutionShape):
            recurrence = self._recurrence_of(shape)
            arguments, options = self._to_recur(layer, recurrence.values, recurrence, plan)
            made.append(recur_tokens.warmup(*arguments, grid=(1, 1, 1), **options))
        return made

    def _recurrence_of(self, shape: DeltaShape | ScanShape) -> LinearRecurrence:
        """Returns what layers of a shape compute, of no tokens."""
        if isinstance(shape, DeltaShape):
            keys = self._nothing(shape.key_heads, shape.key_dim)
            kept = self._nothing(shape.heads, shape.key_dim if shape.by_row else 1)
            values = self._nothing(shape.heads, shape.value_dim)
            return LinearRecurrence(keys, keys, values, kept, self._nothing(shape.heads), delta=True, scale=1.0)
        keys = self._nothing(shape.groups, shape.state_dim)
        kept, values = self._nothing(shape.heads, 1), self._nothing(shape.heads, shape.head_dim)
        rates, skip = self._nothing(shape.heads), self._empty(shape.heads)
        return LinearRecurrence(keys, keys, values, kept, rates, delta=False, skip=skip)

    def _nothing(self, *shape: int) -> Tensor:
        """Returns a tensor of no tokens."""
        return self._empty(0, *shape)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    # Arguments of kernels, and constants that they are compiled with

    def _to_convolve(
        self, layer: int, out: Tensor, x: Tensor, taps: Tensor, bias: Tensor | None, activated: bool, plan: StatePlan
    ) -> Call:
        which, offset = self._windows[layer]
        arguments = (
            out, x, taps, taps if bias is None else bias, self._pool, plan.pieces, plan.sources, plan.sources.shape[1],
            which, offset, self._page_stride, x.stride(0),
        )  # fmt: skip
        return arguments, {
            "CHANNELS": x.shape[1], "TAPS": taps.shape[1], "BIASED": bias is not None, "ACTIVATED": activated,
            "TILE_TOKENS": TILE_TOKENS, "TILE_CHANNELS": TILE_CHANNELS,
        }  # fmt: skip

    def _to_keep(self, layer: int, x: Tensor, taps: Tensor, plan: StatePlan) -> Call:
        (which, offset), inputs = self._windows[layer], taps.shape[1] - 1
        arguments = (
            x, self._pool, plan.runs, plan.segments, plan.sources, plan.targets, plan.sources.shape[1], which, offset,
            self._page_stride, x.stride(0),
        )  # fmt: skip
        return arguments, {
            "CHANNELS": x.shape[1], "INPUTS": inputs, "PADDED_INPUTS": power_of_two(inputs),
            "TILE_CHANNELS": TILE_CHANNELS,
        }  # fmt: skip

    def _to_recur(self, layer: int, out: Tensor, recurrence: LinearRecurrence, plan: StatePlan) -> Call:
        r, (_, heads, value_dim), (_, groups, key_dim) = recurrence, recurrence.values.shape, recurrence.keys.shape
        queries, keys, values = (_heads_together(part) for part in (r.queries, r.keys, r.values))
        arguments = (
            out, queries, keys, values, r.kept.contiguous(), r.rates.contiguous(),
            r.rates if r.skip is None else r.skip, self._pool, self._units[layer], plan.runs, plan.segments,
            plan.sources, plan.targets, plan.sources.shape[1], self._page_stride, queries.stride(0), keys.stride(0),
            values.stride(0), 1.0 if r.scale is None else r.scale, L2_EPS,
        )  # fmt: skip
        return arguments, {
            "HEADS": heads, "SHARED": heads // groups, "KEY_DIM": key_dim, "PADDED_KEYS": power_of_two(key_dim),
            "VALUE_DIM": value_dim, "TILE_VALUES": tile_values(key_dim, value_dim), "BY_ROW": r.kept.shape[2] > 1,
            "DELTA": r.delta, "NORMALISED": r.scale is not None, "SKIPPED": r.skip is not None, "num_warps": 1,
        }  # fmt: skip


def _convolutions_of(shape: KnownShape) -> tuple[int, bool, tuple[bool, ...]]:
    """Returns a layer's channels, whether they are activated, and whether they have a bias: all that may be."""
    match shape:
        case DeltaShape():
            return shape.channels, True, (False,)
        case ScanShape():
            return shape.channels, True, (True,)
        case ConvolutionShape():
            return shape.channels, False, (False, True)


def _heads_together(x: Tensor) -> Tensor:
    """Returns x [tokens, heads, elements] with all elements of a token side by side, as kernels read it."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
