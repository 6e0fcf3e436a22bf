"""Runs the GPU's code on tensors without numbers: torch computes shapes alone, and no kernel of Triton is launched."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

ANSWERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
"""Operations that ask a tensor for a number. The answer is 0: distances between tensors without memory are."""

See = Callable[[str, Mapping[str, Any]], object]
"""Is called with the name of a kernel that would be launched, and its arguments by name, `grid` among them."""


class ZeroAnswers(TorchDispatchMode):
    """Answers questions for a number with 0, where a model of tensors without numbers is made or run."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 0 if operation in ANSWERS else operation(*args, **(kwargs or {}))


@contextmanager
def unlaunched(see: See = lambda name, arguments: None) -> Iterator[None]:  # noqa: ARG005
    """Ends launches of Triton in this process where the kernel would be compiled."""
    kinds = JITFunction, InterpretedFunction
    runs = [kind.run for kind in kinds]

    def end(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:  # noqa: ARG001
        see(kernel.__name__, {**dict(zip(kernel.arg_names, args, strict=False)), **given, "grid": grid})

    for kind in kinds:
        kind.run = end
    try:
        yield
    finally:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = run
