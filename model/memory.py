"""Measures free memory, returns what was freed, and finds the number of KV pages that fit."""

import ctypes
import sys
from dataclasses import dataclass

from cache_manager.layout import KVLayout
from model.cgroup import memory_left, memory_limit

HOST_FRACTION = 0.5
CONTEXT_BYTES = 2**29
"""Bytes that CUDA and its libraries take in a process beside what torch allocates."""


def free_host_bytes() -> int:
    """Returns the bytes that this process may still allocate.

    The machine's available memory, or less if the process's cgroup has less left.
    """
    import psutil  # here: a GPU's engine does not ask

    free, left = int(psutil.virtual_memory().available), memory_left()
    return free if left is None else min(free, left)


def host_bytes() -> int:
    """Returns the bytes of the machine's memory, or of the process's cgroup if that has less."""
    import psutil

    total, most = int(psutil.virtual_memory().total), memory_limit()
    return total if most is None else min(total, most)


def gpu_bytes() -> int:
    """Returns the bytes that the current CUDA device has in all."""
    import torch  # here: a server that only measures the host does not import it

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


@dataclass(frozen=True, slots=True)
class MemoryFound:
    """Memory of a device when the weights are loaded.

    Attributes:
        free: Free bytes.
        total: Bytes in all; None for the host.
        own: Bytes that this process has allocated.
    """

    free: int
    total: int | None = None
    own: int = 0

    @staticmethod
    def of(device: str) -> "MemoryFound":
        if device != "cuda":
            return MemoryFound(free_host_bytes())
        import torch

        torch.cuda.empty_cache()  # what torch keeps of freed memory is free
        return MemoryFound(*torch.cuda.mem_get_info(), torch.cuda.memory_reserved() + CONTEXT_BYTES)

    def for_pool(self, utilization: float, working: int, sharing: int) -> int:
        """Returns the bytes of a KV pool by default: half of the free memory, on a GPU what is left.

        Args:
            utilization: Part of a GPU's memory that the engine may use, with those that share the device.
            working: Bytes that steps take.
            sharing: Engines that share the device.

        Raises:
            ValueError: Nothing is left, or others have it.
        """
        if self.total is None:
            return int(self.free // sharing * HOST_FRACTION)
        part = int(self.total * utilization / sharing)
        left = part - self.own - working
        sizes = (self.total, self.free, self.own, working, part)
        total, free, own, steps, share = (f"{size / 2**30:.1f} GiB" for size in sizes)
        among = f" among {sharing} engines" if sharing > 1 else ""
        named = f"--gpu-memory-utilization {utilization:g} of the GPU's {total}{among} is {share}"
        if part - self.own > self.free:
            raise ValueError(f"{named}, the engine has {own} of it, and only {free} are free: lower it")
        if left <= 0:
            raise ValueError(
                f"{named}. The engine has {own}, mostly weights, and its steps take {steps}: nothing is left for KV. "
                "Raise it, or lower --max-batched-tokens or --max-sequences"
            )
        return left


def check_size(flag: str, memory: int, free: int, ranks: int, engines: int) -> None:
    """Checks a size that an operator has set against the host's memory.

    Ranks of an engine take theirs together. Other engines may have theirs already, or come later, as one that replaces
    another does: what is free now says nothing of their parts, so all together are compared with all of the memory.

    Args:
        flag: Flag that sets the size.
        memory: Bytes for a rank.
        free: Free bytes of the host.
        ranks: Ranks of an engine.
        engines: Engines on the host.

    Raises:
        ValueError: It does not fit.
    """
    if memory > free // ranks:
        raise ValueError(f"{flag} is {memory} bytes, only {free // ranks} are free")
    if engines > 1 and memory * ranks * engines > (total := host_bytes()):
        each = f"each of {ranks} ranks of {engines} engines" if ranks > 1 else f"each of {engines} engines"
        raise ValueError(f"{flag} is {memory} bytes for {each}, and this machine has {total}")


def return_freed_memory() -> None:
    """Returns freed memory to the system, which glibc's malloc keeps otherwise.

    Loading frees blocks of up to 32 MiB between ones that stay. malloc gives back only what is at the end of its
    heap, so the process would keep these for its whole life. Does nothing where malloc is another one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def pool_pages(layout: KVLayout, memory: int, most_tokens: int) -> int:
    """Returns the number of pages that fit.

    Args:
        layout: Layout of the KV pool.
        memory: Bytes for it.
        most_tokens: Tokens beyond which no pages are needed.

    Raises:
        ValueError: Less than one page of each group fits.
    """
    pages = memory // layout.page_bytes
    if pages < layout.tables:
        raise ValueError(
            f"the KV cache has {memory} bytes, one page of {layout.page_size} tokens takes {layout.page_bytes}. "
            "Raise --kv-cache-memory or lower --page-size"
        )
    return min(pages, layout.pages_for(most_tokens))
