"""Measures free memory, returns what was freed, and finds the number of KV pages that fit."""

import ctypes
import sys
from pathlib import Path

from cache_manager.layout import KVLayout

HOST_FRACTION = 0.5
DEVICE_FRACTION = 0.9


def free_host_bytes() -> int:
    """Returns the bytes that this process may still allocate.

    The machine's available memory, or less if the process's cgroup has less left.
    """
    import psutil  # here: a GPU's engine does not ask

    free = int(psutil.virtual_memory().available)
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if most != "max":
            free = min(free, int(most) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except OSError:
        pass  # no cgroup v2
    return free


def free_bytes(device: str) -> tuple[int, float]:
    """Returns the free bytes of a device, and the fraction of them that a KV pool takes by default."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0], DEVICE_FRACTION
    return free_host_bytes(), HOST_FRACTION


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
