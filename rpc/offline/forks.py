"""Refuses an engine after `fork`, which copies a process's memory and none of its threads.

A child would wait for ever: for the engine's thread, or, with an engine of its own, for the threads of the parent's
kernels and of torch.
"""

import os

_ADVICE = "Make it in the child alone, or start the child without fork: multiprocessing.get_context('spawn')"


class Origin:
    """The process that made engines; None as long as none did."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def claim(self) -> None:
        """Before an engine is made. Raises RuntimeError in a process forked from one that had made engines."""
        self.check()
        self._pid = os.getpid()

    def check(self) -> None:
        """Raises RuntimeError in a forked process."""
        if self.is_forked:
            raise RuntimeError(
                f"process {self._pid} made an LLM and then forked this one: no engine survives a fork. {_ADVICE}"
            )

    @property
    def is_forked(self) -> bool:
        return self._pid not in (None, os.getpid())


ORIGIN = Origin()
"""Of this process and those forked from it: threads are the process's, so is this."""
