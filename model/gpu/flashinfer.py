"""Attention of long prompts by FlashInfer's kernels, where that package is installed (Ye et al., MLSys 2025).

On a GPU of compute capability 9.0 they are FlashAttention 3 (Shah et al., NeurIPS 2024), on others FlashAttention 2.
They read the same pages as Triton's kernels, which compute everything else: decodes, short slices, what a step writes.

Which kernels compute a token depends on the number of tokens of its sequence in the step, as among Triton's kernels
(`model.gpu.tuning`). Keys are not divided among programs, since FlashInfer would divide them by the load of the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import log
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout, LayerGroup
from model.attention.backend import StepShape
from model.attention.visible_keys import first_seen
from model.backend import NoKernels
from model.config import ModelConfig
from model.gpu.formats import capability_of
from model.gpu.kv_pool import KVPool

LONG = 1024
"""Tokens of a sequence in a step from which on FlashInfer computes its attention. Such a step is not a CUDA graph."""
HEAD_DIMS = (64, 128, 256)
"""Elements of a head that it has kernels for."""
DTYPES = ("float16", "bfloat16")
WORKSPACE = 128 * 2**20
"""Bytes of the room that its layers share, as FlashInfer recommends."""
PLAN_BYTES = 8 * 2**20 + 128 * 2**10
"""Bytes on the device that FlashInfer takes for the plan of a layer group."""
HOPPER = (9, 0)
"""Compute capability of GPUs that FlashAttention 3 is for."""


class PagedPrefill(Protocol):
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`, as far as it is called here."""

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        window_left: int, logits_soft_cap: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None:  # fmt: skip
        """Plans attention of a batch. Indices are int32, on the host."""

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the attention that was planned last. With return_lse the logarithms of sums too, in powers of 2."""


Maker = Callable[[Tensor, str, str], PagedPrefill]
"""Makes one: room in bytes, the order of a page's axes, the kernels' name."""


def why_not(layout: KVLayout, dtype: str, kv_dtype: str) -> str | None:
    """Returns why FlashInfer can compute no layer of a model; None if it can compute some.

    Args:
        layout: Layout of its KV pool.
        dtype: Type of its weights.
        kv_dtype: Type of its KV.
    """
    if kv_dtype != dtype or dtype not in DTYPES:
        return f"FlashInfer is given weights and KV alike in {' or '.join(DTYPES)}, not {dtype} and {kv_dtype}"
    if any(_is_known(group) for group in layout.groups):
        return None
    return f"FlashInfer is given causal heads of {', '.join(map(str, HEAD_DIMS))} elements, and no layer has such"


def _is_known(group: LayerGroup) -> bool:
    shape = group.shape
    return not group.chunked and not shape.latent and shape.key_dim == shape.value_dim and shape.key_dim in HEAD_DIMS


@dataclass(frozen=True, slots=True, eq=False)
class LongSlices:
    """Slices of a step that FlashInfer computes, in the layer groups that it knows.

    Attributes:
        taken: [n] bool. Whether each of the step's slices is one.
        tokens: Their tokens: from one to another where they are neighbours, else [m] int64 on the device.
        groups: Planned attention by layer group.
    """

    taken: NDArray[np.bool_]
    tokens: slice | Tensor
    groups: dict[int, PagedPrefill]

    def attend(
        self, group: int, queries: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Tensor | None
    ) -> None:
        """Computes the attention of a layer for these tokens.

        Args:
            group: Its group, one of `groups`.
            queries: [tokens of the step, heads, head_dim].
            pages: Keys and values of the layer, each [pages, kv_heads, page_size, head_dim].
            out: As queries, contiguous. Receives the result.
            sinks: As in `AttentionBackend.attend`.
        """
        neighbours = isinstance(self.tokens, slice)
        to = out[self.tokens] if isinstance(self.tokens, slice) else out.new_empty((len(self.tokens), *out.shape[1:]))
        made = self.groups[group].run(queries[self.tokens], pages, out=to, return_lse=sinks is not None)
        if sinks is not None:
            # A further key without a value makes the sum larger, and changes nothing else.
            to.mul_(torch.sigmoid(made[1] * log(2) - sinks)[..., None])
        if not neighbours:
            out[self.tokens] = to


class FlashInferPrompts:
    """Attention of long slices over the pages of a pool. One step after the other is planned and computed.

    Attributes:
        version: FlashInfer's version.
    """

    def __init__(
        self,
        layout: KVLayout,
        heads: int,
        dtype: str,
        device: torch.device,
        scale: float | None,
        soft_cap: float | None,
        make: Maker,
        version: str,
    ) -> None:
        """Allocates FlashInfer's room.

        Args:
            layout: Layout of the pool.
            heads: The number of query heads.
            dtype: Type of queries, keys and values.
            device: Device of the pool.
            scale: As in `TritonAttention`.
            soft_cap: As in `TritonAttention`.
            make: Makes what computes a layer group.
            version: FlashInfer's version.
        """
        self.version = version
        self._layout, self._heads, self._device = layout, heads, device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._scale, self._cap = scale, soft_cap or 0.0
        room = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        kernels = "fa3" if capability_of(device) == HOPPER else "fa2"
        self._wrappers = {
            number: make(room, "HND", kernels) for number, group in enumerate(layout.groups) if _is_known(group)
        }
        self._planned: torch.cuda.Event | None = None

    def plan(self, shape: StepShape) -> LongSlices | None:
        """Plans the long slices of a step; None where none is long.

        Slices with tokens that see each other in both directions are left to Triton's kernels.
        """
        start, count = shape.slices[:, 1].astype(np.int64), shape.slices[:, 2].astype(np.int64)
        taken = (count >= LONG) & (start >= shape.bidirectional)
        which = np.flatnonzero(taken)
        if not len(which):
            return None
        if self._planned is not None:
            self._planned.synchronize()  # plans lie in one place of the host, which the GPU copies when it gets to it
        try:
            for number in self._wrappers:
                self._plan_group(number, shape, which)
        finally:
            if self._device.type == "cuda":
                self._planned = torch.cuda.Event()
                self._planned.record()
        return LongSlices(taken, self._tokens(count, which), self._wrappers)

    def _plan_group(self, number: int, shape: StepShape, which: NDArray[np.int64]) -> None:
        """Plans slices, which are given by index, in a layer group."""
        group, size = self._layout.groups[number], self._layout.page_size
        row, start, count = shape.slices[which].T.astype(np.int64)
        # Pages that no token sees may have another owner.
        first = first_seen(start, group.window, chunked=False) // size
        last = -(-(start + count) // size)
        pages = np.concatenate([shape.tables[number, r, a:b] for r, a, b in zip(row, first, last, strict=True)])
        self._wrappers[number].plan(
            _bounds(count), _bounds(last - first), torch.from_numpy(pages.astype(np.int32)),
            torch.from_numpy(((start + count - 1) % size + 1).astype(np.int32)), self._heads, group.shape.heads,
            group.shape.key_dim, size, causal=True, sm_scale=self._scale or group.shape.key_dim**-0.5,
            window_left=-1 if group.window is None else group.window - 1, logits_soft_cap=self._cap,
            q_data_type=self._dtype, kv_data_type=self._dtype, disable_split_kv=True,
        )  # fmt: skip

    def _tokens(self, count: NDArray[np.int64], which: NDArray[np.int64]) -> slice | Tensor:
        end = np.cumsum(count)
        begin = end - count
        if which[-1] - which[0] + 1 == len(which):
            return slice(int(begin[which[0]]), int(end[which[-1]]))
        tokens = np.concatenate([np.arange(begin[i], end[i]) for i in which])
        return torch.from_numpy(tokens).to(self._device, non_blocking=True)

    def prepare(self, pool: KVPool) -> None:
        """Computes a prompt once for each layer group, so that FlashInfer compiles and loads the kernels of such.

        Raises:
            NoKernels: It cannot: without packages of compiled kernels it needs CUDA's compiler.
        """
        try:
            self._compute_a_prompt(pool)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:  # of FlashInfer's, ninja's or nvcc's kind
            raise NoKernels(f"FlashInfer cannot compute: {type(error).__name__}: {error}") from error

    def _compute_a_prompt(self, pool: KVPool) -> None:
        """Computes the least tokens that are long, all on page 0."""
        layout, groups = self._layout, len(self._layout.groups)
        tables = np.zeros((groups, 1, -(-LONG // layout.page_size)), np.int32)
        slots = np.zeros((groups, LONG), np.int64)
        shape = StepShape(np.array([[0, 0, LONG]], np.int32), np.arange(LONG), slots, tables, np.zeros(1, np.int64))
        for number, wrapper in self._wrappers.items():
            self._plan_group(number, shape, np.zeros(1, np.int64))
            dim = layout.groups[number].shape.key_dim
            queries = torch.zeros((LONG, self._heads, dim), dtype=self._dtype, device=self._device)
            pages = pages_of(pool, layout, number, 0)
            for sums in (False, True):
                wrapper.run(queries, pages, out=torch.empty_like(queries), return_lse=sums)


def open_flashinfer(
    config: ModelConfig, layout: KVLayout, dtype: str, kv_dtype: str, device: torch.device
) -> FlashInferPrompts:
    """Opens FlashInfer for a model, or a rank's part of it.

    Args:
        config: The model.
        layout: Layout of its KV pools.
        dtype: Type of the weights.
        kv_dtype: Type of the KV.
        device: The device.

    Raises:
        NoKernels: It is not installed, or cannot compute here.
    """
    if reason := why_not(layout, dtype, kv_dtype):
        raise NoKernels(reason)
    if find_spec("flashinfer") is None:
        raise NoKernels("FlashInfer is not installed (the extra `flashinfer`)")

    def make(room: Tensor, order: str, kernels: str) -> PagedPrefill:
        made: PagedPrefill = package.BatchPrefillWithPagedKVCacheWrapper(room, order, backend=kernels)
        return made

    try:
        package = import_module("flashinfer")
        version = str(package.__version__)
        return FlashInferPrompts(layout, config.heads, dtype, device, config.scale, config.soft_cap, make, version)
    except Exception as error:  # it loads CUDA's libraries
        raise NoKernels(f"FlashInfer cannot start: {type(error).__name__}: {error}") from error


def pages_of(pool: KVPool, layout: KVLayout, group: int, layer: int) -> tuple[Tensor, Tensor]:
    """Returns the pages of a layer as FlashInfer reads them, in the order of axes that it calls HND.

    Args:
        pool: The pool.
        layout: Its layout.
        group: The layer's group. It has keys and values of one shape, not in 8 bits.
        layer: Index of the layer in it.

    Returns:
        Keys and values, views of the pool, each [pages, kv_heads, page_size, head_dim].
    """
    shape, size = layout.groups[group].shape, layout.page_size
    keys, values = (
        part.as_strided(
            (pool.count, shape.heads, size, shape.key_dim),
            (pool.stride // part.itemsize, size * shape.key_dim, shape.key_dim, 1),
        )
        for part in pool.elements(group, layer)
    )
    return keys, values


def room_of(layout: KVLayout) -> int:
    """Returns the bytes on the device that FlashInfer takes beside weights, KV and activations."""
    return WORKSPACE + PLAN_BYTES * sum(_is_known(group) for group in layout.groups)


def _bounds(counts: Sequence[int] | NDArray[np.int64]) -> Tensor:
    """Returns [n + 1] int32: where each of these counts begins, and where the last one ends."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
