"""Refuses an engine after `fork`, which copies a process's memory and none of its threads.

A child would wait for ever for the engine's thread. With an engine of its own it would wait for the threads of the
parent's kernels and of torch.
"""

import os

_ADVICE = "Make it in the child alone, or start the child without fork: multiprocessing.get_context('spawn')"


class Origin:
    """Remembers the process that made engines."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def claim(self) -> None:
        """Records that this process makes an engine.

        Raises:
            RuntimeError: A process that had made engines forked this one.
        """
        self.check()
        self._pid = os.getpid()

    def check(self) -> None:
        """Raises RuntimeError if a process that had made engines forked this one."""
        if self.is_forked:
            raise RuntimeError(
                f"process {self._pid} made an LLM and then forked this one: no engine survives a fork. {_ADVICE}"
            )

    @property
    def is_forked(self) -> bool:
        """Whether a process that had made engines forked this one."""
        return self._pid not in (None, os.getpid())


ORIGIN = Origin()
"""The one origin of this process, and, as a copy, of its forks: engines' threads belong to a process."""
