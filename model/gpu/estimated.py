"""Estimates the memory of a model on a GPU, without the device and without the weights.

The engine's own code runs on tensors without numbers: the model is built from its config.json, and its largest steps
are run as `model.gpu.working_memory` runs them on a device. All that torch would allocate is counted.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.backend import NoKernels, StepSizes
from model.config import ModelConfig
from model.errors import CheckpointError
from model.footprint import shape_with_weights
from model.gpu.attention_backend import TritonAttention
from model.gpu.backend import TritonBackend, why_no_kernels
from model.gpu.flashinfer import room_of
from model.gpu.flashinfer import why_not as why_not_flashinfer
from model.gpu.graphs import graph_tokens
from model.gpu.parts import with_kernels
from model.gpu.unlaunched import ZeroAnswers, unlaunched
from model.gpu.working_memory import WorkingMemory, measure_steps
from model.parallel.collective import ONE_RANK, Ranks
from model.parallel.shard import Shard
from model.parallel.unconnected import Unconnected
from model.settings import ModelSettings
from model.weight_formats.scratch import Scratch

META, HOST = torch.device("meta"), torch.device("cpu")
BLOCK = 512
"""Bytes to whose multiples torch's allocator of CUDA memory rounds."""


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """Memory of an engine, or of each of its ranks, on a GPU.

    Attributes:
        weights: Bytes of the weights, and of what is made with them: tables of angles, room to unpack weights in, that
            of FlashInfer.
        working: What steps take beside weights and KV.
    """

    weights: int
    working: WorkingMemory


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of tensors that torch's operations make.

    Attributes:
        peak: The most that were there at once.
        now: Those that are there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._sizes: dict[int, int] = {}  # by storage

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._take(one, given)
        return made

    def _take(self, tensor: Tensor, given: set[int]) -> None:
        """Counts a tensor that has memory of its own: that of an operation's arguments was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in given:
            return
        self._sizes[key] = size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class CountedMemory:
    """`DeviceMemory` of no device: what torch would allocate."""

    def peak_of(self, work: Callable[[], object]) -> int:
        with unlaunched(), ZeroAnswers(), AllocationCounter() as counter:
            work()
        return counter.peak


def estimate_device(config: ModelConfig, settings: ModelSettings, sizes: StepSizes) -> DeviceEstimate:
    """Estimates the memory of a model on a GPU, one without products of float8: it unpacks such weights.

    Args:
        config: Configuration of the model, undivided.
        settings: Its types, page size, format of weights and degree of tensor parallelism.
        sizes: Most of what a step has.

    Raises:
        NoKernels: There are no kernels for the model.
        CheckpointError: See `build_model`; or its steps cannot be run without numbers.
    """
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    shard = Shard(0, settings.tensor_parallel)
    own = shard.of(config)
    layout = own.kv_layout(settings.page_size, kv_dtype)
    if reason := why_no_kernels(own, layout):
        raise NoKernels(reason)
    prompts = settings.backend == "flashinfer"
    if prompts and (reason := why_not_flashinfer(layout, dtype, kv_dtype)):
        raise NoKernels(reason)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    maker = TritonBackend(dtype, kv_dtype, META, Scratch(torch_dtype, META)).maker

    def attention() -> TritonAttention:
        # On the host: plans have numbers.
        return TritonAttention(layout, 1, own.heads, kv_dtype, HOST, dtype, own.scale, own.soft_cap)

    ranks = ONE_RANK if shard.size == 1 else Ranks(shard, Unconnected(shard, runs_ahead=True))
    try:
        with torch.inference_mode():
            with unlaunched(), ZeroAnswers(), AllocationCounter() as counter:
                built, held = shape_with_weights(config, torch_dtype, settings.quantization, maker, ranks, packs=False)
                decoder = with_kernels(built)
            weights, recorded = counter.now + held.repeated, graph_tokens(decoder, layout, sizes)
            working = measure_steps(decoder, attention, layout, config.rotary_axes, CountedMemory(), sizes, recorded)
    except CheckpointError:
        raise
    except Exception as error:  # as where weights are loaded
        raise CheckpointError(f"its steps cannot be run without numbers: {error!r:.200}") from error
    return DeviceEstimate(weights + (room_of(layout) if prompts else 0), working)
