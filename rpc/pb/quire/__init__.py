"""Quire's Python API. The protobuf messages are in `quire.v1`.

The engine's parts load when they are first asked for, so importing `quire.v1` costs a client no torch.
"""

from importlib import import_module
from typing import Any

from quire.packages import PACKAGES, check_packages

_CLIENTS = {
    "AsyncClient": "rpc.client",
    "Client": "rpc.client",
}
_ENGINE = {
    "Beam": "scheduler.request",
    "Completion": "rpc.offline",
    "Generated": "rpc.offline",
    "InvalidRequest": "scheduler.request",
    "LLM": "rpc.offline",
    "Output": "scheduler.request",
    "PromptsFailed": "rpc.offline",
    "RequestFailed": "rpc.frontend.errors",
    "Sampling": "scheduler.request",
    "Stopping": "scheduler.request",
}

__all__ = ["__version__", *_CLIENTS, *_ENGINE]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        check_packages("rpc")
        return _load("rpc.distribution", "own_version")()
    if name in _CLIENTS:
        check_packages("rpc")  # a client needs no other, and works beside a user's `model.py`
        return _load(_CLIENTS[name], name)
    if name in _ENGINE:
        check_packages(*PACKAGES)
        return _load(_ENGINE[name], name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def _load(home: str, name: str) -> Any:
    try:
        return getattr(import_module(home), name)
    except AttributeError as error:  # `from quire import LLM` would hide it: "cannot import name 'LLM'"
        raise ImportError(f"{home} cannot be imported: {error}", name=home) from error
