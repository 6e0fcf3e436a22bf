"""An event loop whose time passes only where it would wait: tests of times hold on a machine of any speed."""

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pytest

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Clock(selectors.DefaultSelector):
    """Stands for `time.monotonic` and `time.sleep`. As a selector, it lets time pass instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self.sleep(max(0.0, timeout))
        return ready


def in_virtual_time(
    test: Callable[Arguments, Coroutine[Any, Any, Result]],
) -> Callable[Arguments, Result]:
    """Makes a test of a coroutine, all of which has to be in this process and on its loop."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        clock = Clock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: clock.now)
            patch.setattr(time, "sleep", clock.sleep)
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
                return runner.run(test(*args, **kwargs))

    return run
