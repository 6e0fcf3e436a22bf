"""Memory of the device."""

import gc

import torch


def free() -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_device_bytes(device: torch.device) -> int | None:
    """None where it is no GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
