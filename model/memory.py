"""How much memory is free, and how many KV pages it makes."""

from pathlib import Path

from cache_manager.layout import KVLayout

HOST_FRACTION = 0.5
DEVICE_FRACTION = 0.9


def free_host_bytes() -> int:
    """What this process may still take: the machine's available memory, or less if its cgroup has less left."""
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
    """Free bytes on a device, and the part of them that a KV pool takes if nobody says otherwise."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0], DEVICE_FRACTION
    return free_host_bytes(), HOST_FRACTION


def pool_pages(layout: KVLayout, memory: int, most_tokens: int) -> int:
    """Pages in `memory` bytes, but no more than `most_tokens` need. Raises ValueError where not one page fits."""
    pages = memory // layout.page_bytes
    if pages < len(layout.groups):
        raise ValueError(
            f"the KV cache has {memory} bytes, one page of {layout.page_size} tokens takes {layout.page_bytes}. "
            "Raise --kv-cache-memory or lower --page-size"
        )
    return min(pages, layout.pages_for(most_tokens))
