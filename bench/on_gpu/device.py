"""Describes device and host of a run."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
"""Fields of nvidia-smi. They are only read: a bench changes no setting of a device."""
PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")


def facts(device: torch.device) -> dict[str, Any]:
    """Returns facts for the head of a report; unknown ones are left out."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if device.type != "cuda":
        return found | {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    memory = torch.cuda.mem_get_info(device)
    found |= {
        "device": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "multiprocessors": properties.multi_processor_count,
        "memory": f"{memory[1] / 2**30:.1f} GiB, {memory[0] / 2**30:.1f} free",
        "L2": f"{getattr(properties, 'L2_cache_size', 0) / 2**20:.0f} MiB",
        "CUDA": torch.version.cuda,
    }
    return found | driver_facts()


def driver_facts() -> dict[str, str]:
    """Returns driver and clocks from nvidia-smi; nothing without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in output.strip().splitlines()[0].split(",")]
    return dict(zip((f"driver's {name}" for name in QUERY), values, strict=False))


def head(found: dict[str, Any]) -> str:
    """Returns the head of a report as Markdown."""
    return "\n".join(["## Quire on a device", "", *(f"- {key}: {value}" for key, value in found.items()), ""])
