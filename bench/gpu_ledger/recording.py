"""Records the launches of code that runs on tensors without numbers: torch's operations, and Triton's kernels.

No kernel runs. torch computes shapes alone for tensors of the device "meta", and a launch of Triton ends where the
kernel would be compiled. Both are recorded as the code makes them, so the ledger's launches are the engine's own.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_ledger import costs
from bench.gpu_ledger.costs import ROWS, Work
from model.gpu.unlaunched import unlaunched

ALLOCATIONS = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided")
LINEAR = torch.ops.aten.linear.default
EMBEDDING = torch.ops.aten.embedding.default
INDEX = torch.ops.aten.index.Tensor


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        name: Name of the kernel or of torch's operation.
        work: Its work.
        by_triton: Whether Triton launches it, not torch.
        recorded: Whether it is part of a CUDA graph.
        empty: Whether it has no programs, so that the host is all that it takes time of.
    """

    name: str
    work: Work
    by_triton: bool
    recorded: bool
    empty: bool


class Recording:
    """Launches in their order.

    Attributes:
        launches: The launches.
        graphs: CUDA graphs that were replayed.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.graphs = 0
        self._within = False

    def add(self, name: str, work: Work, by_triton: bool = False, empty: bool = False) -> None:
        self.launches.append(Launch(name, work, by_triton, self._within, empty))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Counts the launches inside as those of one CUDA graph."""
        self.graphs += 1
        self._within = True
        try:
            yield
        finally:
            self._within = False


class OperationRecorder(TorchDispatchMode):
    """Records torch's operations that launch a kernel: all but views and allocations."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, Tensor)]
        if not isinstance(out, Tensor) or not any(one.is_meta for one in (*given, out)):
            return out  # several results are views; what is on the host launches nothing
        changes = operation._schema.is_mutable
        allocates = str(operation).startswith(ALLOCATIONS)
        if allocates or (not changes and any(_is_view(out, one) for one in given)):
            return out
        self._recording.add(str(operation).removeprefix("aten.").partition(".")[0], _work(operation, args, given, out))
        return out


def _is_view(out: Tensor, given: Tensor) -> bool:
    return out.untyped_storage()._cdata == given.untyped_storage()._cdata


def _work(operation: Any, args: Any, given: list[Tensor], out: Tensor) -> Work:
    if operation is LINEAR:
        return costs.of_product(args[0], args[1], out)
    if operation in (EMBEDDING, INDEX):  # rows that are looked up
        return Work(ROWS, activations=2 * out.nbytes)
    return Work(ROWS, activations=sum(one.nbytes for one in given if one is not out) + out.nbytes)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Records all launches inside."""
    recording = Recording()

    def record(name: str, arguments: Mapping[str, Any]) -> None:
        recording.add(name, costs.of_kernel(name, arguments), True, math.prod(arguments["grid"]) == 0)

    with unlaunched(record), OperationRecorder(recording):
        yield recording
