"""A driver of a GPU that does nothing: kernels are compiled for compute capability 9.0, and launches launch nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton import runtime
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class FakeDriver:
    """Answers to what Triton asks its driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - Triton's signature
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@contextmanager
def fake_driver(see: Callable[[Any, Any, dict[str, Any]], None] | None = None) -> Iterator[None]:
    """Lets launches end after Triton has bound their arguments and found their compiled kernel.

    Args:
        see: Called with each launched kernel, what it was compiled to, and its arguments by name, `grid` among them.
    """
    run, driver = JITFunction.run, runtime.driver._active

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG001
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        if see is not None:
            see(kernel, made, {**dict(zip(kernel.arg_names, args, strict=False)), **options, "grid": grid})
        return made

    JITFunction.run, runtime.driver._active = compile_only, FakeDriver()
    try:
        yield
    finally:
        JITFunction.run, runtime.driver._active = run, driver
