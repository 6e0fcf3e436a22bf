"""Host memory of an exact size, page-locked where a GPU copies from it.

torch's own page-locked memory is rounded up to a power of 2: 65 GiB would take 128. This is mapped by itself and
registered with CUDA.
"""

import logging
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("quire.pages")


class Cudart(Protocol):
    """The part of `torch.cuda.cudart()` that locks pages. Its functions return an error's code, 0 for none."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> Any: ...  # noqa: N802 - CUDA's name

    def cudaHostUnregister(self, address: int, /) -> Any: ...  # noqa: N802


@dataclass(frozen=True, slots=True, eq=False)
class PageLocking:
    """Locks pages of host memory.

    Attributes:
        cudart: CUDA's runtime.
        launch: Launches a kernel.
    """

    cudart: Cudart
    launch: Callable[[], object]

    @staticmethod
    def of_cuda() -> "PageLocking":
        return PageLocking(torch.cuda.cudart(), lambda: torch.ones(1, device="cuda"))

    def lock(self, address: int, size: int) -> int:
        """Locks memory. Returns the code of an error, 0 for none."""
        return self._checked(int(self.cudart.cudaHostRegister(address, size, 0)))

    def unlock(self, address: int) -> int:
        """Unlocks memory. Returns the code of an error, 0 for none."""
        return self._checked(int(self.cudart.cudaHostUnregister(address)))

    def _checked(self, code: int) -> int:
        if code:
            # CUDA keeps the error until it is asked for it, and the check of the next launch asks: this one.
            with suppress(RuntimeError):
                self.launch()
        return code


class HostMemory:
    """Zeros in host memory.

    Attributes:
        content: [size] uint8.
    """

    def __init__(self, size: int, locking: PageLocking | None) -> None:
        """Takes the memory.

        Args:
            size: Bytes, at least 1.
            locking: Locks its pages. Where that fails, the log says so, and they are not. None: they need not be.
        """
        self.content = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self._unlock: Callable[[], object] | None = None
        if locking is None:
            return
        if code := locking.lock(self.content.data_ptr(), size):
            log.warning(
                "%d bytes of host memory cannot be page-locked (CUDA error %d): copies between them and the GPU take "
                "longer",
                size, code,
            )  # fmt: skip
            return
        # Also where nothing calls `close`: memory has to be unlocked before it is unmapped.
        self._unlock = weakref.finalize(self, _unlock, locking, self.content)

    def close(self) -> None:
        """Unlocks the pages. A second call does nothing."""
        if self._unlock is not None:
            self._unlock()


def _unlock(locking: PageLocking, content: Tensor) -> None:
    if code := locking.unlock(content.data_ptr()):
        log.warning("%d bytes of host memory stay page-locked (CUDA error %d)", len(content), code)
