"""Chooses the back end that computes a model.

Kernels are imported when they are chosen. Everything else works without their compilers, llvmlite and Triton.
"""

import logging

import torch

from model.backend import Backend, NoKernels
from model.config import ModelConfig
from model.parallel.collective import ONE_RANK, Ranks
from model.reference.backend import TorchBackend
from model.settings import ModelSettings

log = logging.getLogger("quire.model")


def choose_backend(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks = ONE_RANK
) -> Backend:
    """Chooses by `settings.backend` and by the kernels that can run here.

    Args:
        config: The model.
        settings: Settings with the wanted back end.
        dtype: Type of the weights.
        kv_dtype: Type of the KV cache.
        device: cpu or cuda.
        ranks: Ranks that the model is divided among. All of them choose alike.

    Raises:
        ValueError: The settings insist on kernels that cannot run here.
    """
    plain = TorchBackend(kv_dtype, torch.device(device))
    if settings.backend == "reference":
        return plain
    insisting = settings.backend != "auto"
    gpu = settings.backend in ("triton", "flashinfer") or (not insisting and device != "cpu")
    try:
        if gpu:
            return _open_gpu(config, settings, dtype, kv_dtype, device, ranks)
        return _open_cpu(config, settings, dtype, kv_dtype, device, ranks)
    except NoKernels as reason:
        if insisting:
            raise ValueError(f"--backend is {settings.backend!r}: {reason}") from None
        log.info("The %s's kernels are not used: %s", "GPU" if gpu else "CPU", reason)
        return plain


def _open_gpu(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks
) -> Backend:
    """Opens the GPU's back end.

    Raises:
        NoKernels: It cannot run here.
    """
    if device != "cuda":
        raise NoKernels("they need --device cuda" if settings.device == "cpu" else "there is no CUDA device")
    if torch.version.hip is not None:
        raise NoKernels("on AMD's devices they were compiled and never run")
    try:
        from model.gpu.backend import open_gpu_backend
    except ImportError as error:
        raise NoKernels(f"{error.name} is not installed") from None
    return open_gpu_backend(config, settings, dtype, kv_dtype, device, ranks)


def _open_cpu(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks
) -> Backend:
    """Opens the CPU's back end.

    Raises:
        NoKernels: It cannot run here.
    """
    if device != "cpu":
        raise NoKernels(f"the device is {device}")
    try:
        from model.cpu.backend import open_cpu_backend
    except ImportError as error:
        raise NoKernels(f"{error.name} is not installed") from None
    except OSError as error:
        raise NoKernels(f"llvmlite cannot be loaded: {error}") from None
    return open_cpu_backend(config, settings, dtype, kv_dtype, ranks)
