"""Chooses the back end that computes a model.

Kernels are imported when they are asked for: without their compilers, llvmlite and Triton, everything else works.
"""

import logging

import torch

from model.backend import Backend, NoKernels
from model.config import ModelConfig
from model.parallel.collective import ALONE, Ranks
from model.reference.backend import TorchBackend
from model.settings import ModelSettings

log = logging.getLogger("quire.model")


def choose_backend(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks = ALONE
) -> Backend:
    """Chooses by `settings.backend` and by what can run here.

    Args:
        dtype: Of the weights.
        kv_dtype: Of the KV cache.
        device: cpu or cuda.
        ranks: Among which the model is divided. All of them choose alike.

    Raises:
        ValueError: The settings insist on kernels that cannot run here.
    """
    plain = TorchBackend(kv_dtype, torch.device(device))
    if settings.backend == "reference":
        return plain
    insisting = settings.backend != "auto"
    gpu = settings.backend == "triton" or (not insisting and device != "cpu")
    try:
        if gpu:
            if ranks.shard.size > 1:
                raise NoKernels("they are for a model that is not divided among ranks")
            return _open_gpu(config, settings, dtype, kv_dtype, device)
        return _open_cpu(config, settings, dtype, kv_dtype, device, ranks)
    except NoKernels as reason:
        if insisting:
            raise ValueError(f"--backend is {settings.backend!r}: {reason}") from None
        log.info("The %s's kernels are not used: %s", "GPU" if gpu else "CPU", reason)
        return plain


def _open_gpu(config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str) -> Backend:
    """Raises NoKernels."""
    if device != "cuda":
        raise NoKernels("they need --device cuda" if settings.device == "cpu" else "there is no CUDA device")
    if torch.version.hip is not None:
        raise NoKernels("they are for NVIDIA's devices")
    try:
        from model.gpu.backend import open_gpu_backend
    except ImportError as error:
        raise NoKernels(f"{error.name} is not installed") from None
    return open_gpu_backend(config, settings, dtype, kv_dtype, device)


def _open_cpu(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks
) -> Backend:
    """Raises NoKernels."""
    if device != "cpu":
        raise NoKernels(f"the device is {device}")
    try:
        from model.cpu.backend import open_cpu_backend
    except ImportError as error:
        raise NoKernels(f"{error.name} is not installed") from None
    except OSError as error:
        raise NoKernels(f"llvmlite cannot be loaded: {error}") from None
    return open_cpu_backend(config, settings, dtype, kv_dtype, ranks)
