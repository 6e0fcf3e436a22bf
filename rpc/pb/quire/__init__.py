"""Quire's Python API. The protobuf messages are in `quire.v1`.

The engine's parts load when they are first asked for, so importing `quire.v1` costs a client no torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "LLM": "rpc.offline",
    "Completion": "rpc.offline",
    "Output": "scheduler.request",
    "RequestFailed": "rpc.frontend.errors",
    "Sampling": "scheduler.request",
    "Stopping": "scheduler.request",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
