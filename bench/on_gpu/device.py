"""What the run was on."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
"""Of nvidia-smi. Only read: a bench changes no setting of a device."""
PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")


def facts(device: torch.device) -> dict[str, Any]:
    """For the head of a report; what cannot be told is left out."""
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
    return found | said_by_driver()


def said_by_driver() -> dict[str, str]:
    """Driver and clocks. Nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in said.strip().splitlines()[0].split(",")]
    return dict(zip((f"driver's {name}" for name in QUERY), values, strict=False))


def head(found: dict[str, Any]) -> str:
    """Markdown."""
    return "\n".join(["## Quire on a device", "", *(f"- {key}: {value}" for key, value in found.items()), ""])
