"""Sequences with recurrent states on random pages of a pool."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bench.on_gpu.pages import Slices
from cache_manager.layout import KVLayout, KVShape, LayerGroup
from model.attention.backend import StateSegments
from model.gpu.kv_pool import KVPool
from model.gpu.plan import laid_out
from model.gpu.state_plan import StatePlan, StateWork
from model.gpu.states import GpuStates
from model.recurrent import RecurrentShape

LAYER = 0


@dataclass(frozen=True, slots=True, eq=False)
class StateBook:
    """Pages of the states of one layer.

    Attributes:
        layout: Layout of the pool.
        states: The states, and the kernels over them.
        tables: [pages of a state, sequences, entries] int32. Pages of each sequence's checkpoints.
        device: Device of the pool.
    """

    layout: KVLayout
    states: GpuStates
    tables: NDArray[np.int32]
    device: torch.device

    @staticmethod
    def of(shape: RecurrentShape, sequences: int, tokens: int, device: torch.device) -> "StateBook":
        """Gives random pages to sequences of up to `tokens` tokens. The pool is NaN."""
        layout = KVLayout((LayerGroup((1,), KVShape(1, 128, 128)),), 2, 16, recurrent=(shape.state(LAYER),))
        sizes = layout.states.pages, sequences, -(-tokens // layout.interval)
        pages = math.prod(sizes)
        pool = KVPool(layout, pages, "bfloat16", device)
        pool.poison(np.arange(pages, dtype=np.int32))
        tables = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(sizes)
        return StateBook(layout, GpuStates(layout, pool, device), tables, device)

    def plan(self, slices: Slices) -> StatePlan:
        """Returns the plan of a step."""
        segments = StateSegments.of(self.tables, self.layout.interval, *np.array(slices, np.int64).T)
        plan = laid_out([], self.device, StateWork.of(segments)).states
        if plan is None:
            raise ValueError("a step without segments")
        return plan
