"""Watches how many rows of logits, and of what is made from them, torch holds."""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LogitWatch(TorchDispatchMode):
    """Watches tensors of this thread that have a column for each id of a vocabulary.

    Attributes:
        rows: Most rows of one of them.
        peak: Most bytes that those made here have held at a time.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows, self.peak, self._vocabulary = 0, 0, vocabulary
        self._held: dict[int, int] = {}  # bytes by the storage's address

    def __torch_dispatch__(
        self, function: Any, _: Any, args: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(named or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == self._vocabulary:
                self._see(tensor)
        return made

    def _see(self, tensor: Tensor) -> None:
        if tensor.stride(1) != 1:  # transposed weights
            return
        self.rows = max(self.rows, len(tensor))
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._held and storage.nbytes() == tensor.nbytes:
            self._held[key] = storage.nbytes()
            weakref.finalize(storage, self._held.pop, key, None)
        self.peak = max(self.peak, sum(self._held.values()))
