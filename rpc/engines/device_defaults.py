"""Settings of the scheduler whose defaults depend on the device: one place chooses all of them."""

import logging
from typing import NamedTuple

from model.loading import choose_device
from model.memory import gpu_bytes
from rpc.settings import EngineConfig
from scheduler.settings import DEFAULT_STEP_TOKENS, SchedulerSettings

log = logging.getLogger("quire.engines")

GPU_STEP_TOKENS = ((70 * 2**30, 8192), (36 * 2**30, 4096), (0, 2048))
"""Bytes of a GPU from which on a step has this token budget.

From about 2,048 tokens on the products of a dense model take longer than reading its weights. A larger budget needs
fewer steps for the same prompts, and takes memory that the KV pool would have. The bounds lie between the sizes that
GPUs have: up to 32 GB, 40 to 64 GB, 80 GB and more. vLLM's server takes 8,192 from 70 GiB on, and 2,048 below.
"""


class DeviceDefaults(NamedTuple):
    """Defaults of a device.

    Attributes:
        step_tokens: Token budget of a step.
        depth: Steps in flight.
    """

    step_tokens: int
    depth: int


def device_defaults(memory: int | None) -> DeviceDefaults:
    """Returns the defaults of a device.

    Args:
        memory: Bytes of the GPU that the engine may use, shared ones divided; None on a CPU.
    """
    if memory is None:
        return DeviceDefaults(DEFAULT_STEP_TOKENS, 1)
    return DeviceDefaults(next(tokens for least, tokens in GPU_STEP_TOKENS if memory >= least), 2)


def device_settings(config: EngineConfig) -> SchedulerSettings:
    """Returns an engine's scheduler settings, with the defaults of its device for those that are not set.

    Raises:
        ValueError: The device is not here.
    """
    settings, engines = config.scheduler, config.engines_on_gpu
    if settings.max_batched_tokens is not None and settings.steps_in_flight is not None:
        return settings
    memory = gpu_bytes() if choose_device(config.model.device) == "cuda" else None
    defaults = device_defaults(None if memory is None else memory // engines)
    made = settings.with_defaults(*defaults)
    if settings.max_batched_tokens is None:
        device = "a CPU" if memory is None else f"a GPU with {memory / 2**30:.1f} GiB"
        sharing = f" for {engines} engines" if memory is not None and engines > 1 else ""
        raised = ", raised to --max-sequences" if made.step_tokens > defaults.step_tokens else ""
        log.info("--max-batched-tokens is %d, the default of %s%s%s", made.step_tokens, device, sharing, raised)
    return made
