"""Watches what Triton compiles, so that a step which waits for a compiler does not count as one that hangs."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from triton import knobs

log = logging.getLogger("quire.model")

Hook = Callable[..., Any]

LONGEST = 600.0
"""Seconds after which a compilation counts as failed: no hook says that one did."""


class Compilations:
    """Compilations of this process, from `watch` on. Safe to read from any thread.

    Attributes:
        count: Kernels that were compiled, or loaded from Triton's cache on disk.
    """

    def __init__(self) -> None:
        self.count = 0
        self._began: dict[int, float] = {}  # thread to the start of its compilation
        self._last = 0.0
        self._serving = False

    def watch(self) -> None:
        """Asks Triton to report compilations here alone. Others' hooks keep working."""
        runtime = knobs.runtime
        runtime.jit_cache_hook = _chained(runtime.jit_cache_hook, self._begin)
        runtime.jit_post_compile_hook = _chained(runtime.jit_post_compile_hook, self._end)

    def expect_none(self) -> None:
        """From now on each compilation is logged as a warning: a request waits for it."""
        self._serving = True

    @property
    def last(self) -> float:
        """Time of the last compilation on the monotonic clock: now while there is one, 0 before the first."""
        now = time.monotonic()
        compiling = any(now - began < LONGEST for began in list(self._began.values()))
        return now if compiling else self._last

    def _begin(self, **_: Any) -> None:
        self._began[threading.get_ident()] = time.monotonic()

    def _end(self, **about: Any) -> None:
        now = time.monotonic()
        seconds = now - self._began.pop(threading.get_ident(), now)
        self.count += 1
        self._last = now
        if self._serving:
            log.warning("a step waited %.1f s for a kernel: %s", seconds, about.get("repr", "?"))


class ChainedHook(NamedTuple):
    """A hook behind another one, which may say that there is nothing to compile."""

    other: Hook | None
    own: Hook

    def __call__(self, **about: Any) -> Any:
        if self.other is not None and (done := self.other(**about)):
            return done
        return self.own(**about)


def _chained(other: Any, own: Hook) -> ChainedHook:
    """Returns a hook behind another one. One of an earlier `watch` ends: a process has one model at a time."""
    return ChainedHook(other.other if isinstance(other, ChainedHook) else other, own)
