"""Leaves the process little memory of its device: other processes on the device notice nothing of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.model.gpu.device.place import DEVICE, REHEARSED


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """Lets torch take `more` bytes beside what its allocator holds for live tensors."""
    if REHEARSED:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def none() -> Iterator[None]:
    """Takes all memory that there is, down to the least that torch gives: the next tensor finds none."""
    if REHEARSED:
        raise torch.OutOfMemoryError("planted")
    taken, size = [], 2**26
    with at_most(0):
        while size >= 512:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
            except torch.OutOfMemoryError:
                size //= 2
        try:
            yield
        finally:
            taken.clear()


class Lacking:
    """A function of the product that finds no memory in some of its calls.

    Attributes:
        failed: Calls that raised for a lack of memory.
    """

    def __init__(self, lacks: Callable[[int, tuple[Any, ...]], bool]) -> None:
        """lacks: whether a call, by its number from 1 on and its arguments, finds none."""
        self._lacks, self._calls, self.failed = lacks, 0, 0

    def __call__(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self._calls += 1
            if not self._lacks(self._calls, args):
                return real(*args, **options)
            try:
                with none():
                    return real(*args, **options)
            except torch.OutOfMemoryError:
                self.failed += 1
                raise

        return called
