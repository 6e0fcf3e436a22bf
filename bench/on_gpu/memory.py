"""Memory of the device."""

import gc

import torch


def free() -> None:
    """Collects garbage, and gives unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_device_bytes(device: torch.device) -> int | None:
    """Returns the free bytes of a GPU's memory; None for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
