"""`quire estimate`: computes what a model takes of memory from config.json alone."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model.backend import NoKernels, StepSizes
from model.config import ModelConfig, read_config
from model.footprint import weight_bytes
from model.memory import CONTEXT_BYTES, HOST_FRACTION, MemoryFound, free_host_bytes, pool_pages
from model.parallel.shard import Shard
from model.settings import ModelSettings
from rpc.cli.options import UNITS
from rpc.paths import model_name
from scheduler.settings import SchedulerSettings

Values = dict[str, int | str | None]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that an engine, or each of its ranks, is to have alone.

    Attributes:
        memory: Its bytes.
        scheduler: Settings of the engine's scheduler.
    """

    memory: int
    scheduler: SchedulerSettings


def estimate(directory: Path, settings: ModelSettings, length: int | None = None, gpu: Gpu | None = None) -> Values:
    """Returns the sizes that `show` prints.

    Args:
        directory: Folder of the model.
        settings: Types, page size and memory.
        length: Tokens of a sequence; None takes the model's context.
        gpu: GPU that is estimated for; None for this machine's memory.

    Raises:
        CheckpointError: config.json cannot be read, or the model cannot be served.
        ValueError: `length` is outside the model's context, or the GPU has no kernels for the model or is too small.
    """
    config, page_size = read_config(directory), settings.page_size
    weights_dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    dtype = weights_dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    length = config.context if length is None else length
    if not 1 <= length <= config.context:
        raise ValueError(f"--length is {length}, the model's context is {config.context} tokens")
    layout = Shard(0, settings.tensor_parallel).of(config).kv_layout(page_size, dtype)
    if gpu is None:
        taken = _on_host(config, settings, weights_dtype)
        pages = taken["memory_bytes"] // layout.page_bytes
    else:
        taken = _on_gpu(config, settings, gpu)
        pages = pool_pages(layout, taken["memory_bytes"], gpu.scheduler.max_sequences * config.context)
    a_sequence = layout.pages_for(length, ahead=1)  # while it decodes, one token at a time
    return {
        "model": model_name(settings.model, directory),
        "architecture": config.architecture,
        "quantization": settings.quantization or config.stored_format or None,
        **taken,
        "dtype": dtype,
        "page_size": page_size,
        "bytes_a_token": layout.token_bytes,
        "bytes_a_page": layout.page_bytes,
        "state_bytes": layout.states.pages * layout.page_bytes,
        "checkpoint_tokens": layout.interval,
        "pages": pages,
        "tokens": layout.tokens_in(pages),
        "sequence_tokens": length,
        "sequence_pages": a_sequence,
        "sequence_bytes": a_sequence * layout.page_bytes,
        "sequences": pages // a_sequence,
    }


LABELS = {
    "model": "Model",
    "architecture": "Architecture",
    "quantization": "Quantization",
    "gpu_bytes": "Memory of the GPU",
    "usable_bytes": "Of it the engine's part",
    "context_bytes": "CUDA and its libraries",
    "weight_bytes": "Weights",
    "step_bytes": "A step of {step_tokens:,} tokens",
    "graph_bytes": "CUDA graphs",
    "sampler_bytes": "Sampler",
    "image_bytes": "Features of images",
    "memory_bytes": "Memory for KV",
    "dtype": "KV dtype",
    "page_size": "Page size (tokens)",
    "bytes_a_token": "KV of a token",
    "bytes_a_page": "KV of a page",
    "state_bytes": "Recurrent state of a sequence",
    "checkpoint_tokens": "Tokens between checkpoints of it",
    "pages": "Pages",
    "tokens": "Tokens in all",
    "sequence_tokens": "Sequence length (tokens)",
    "sequence_pages": "Pages a sequence",
    "sequence_bytes": "KV of a sequence",
    "sequences": "Such sequences that fit",
}
WHERE_ANY = ("state_bytes", "checkpoint_tokens", "image_bytes")


def _on_host(config: ModelConfig, settings: ModelSettings, dtype: str) -> dict[str, int]:
    """Returns what weights and KV take of this machine's memory, in bytes."""
    packs = None if dtype == "float16" else True  # in which there are no kernels
    weights, memory = weight_bytes(config, dtype, settings.quantization, packs), settings.kv_cache_memory
    if memory is None:
        memory = max(0, int((free_host_bytes() - weights) * HOST_FRACTION))
    return {"weight_bytes": weights, "memory_bytes": memory}


def _on_gpu(config: ModelConfig, settings: ModelSettings, gpu: Gpu) -> dict[str, int]:
    """Returns what takes how many bytes of a GPU, and what is left for KV. Raises as `estimate`."""
    try:
        from model.gpu.estimated import estimate_device
    except ImportError as error:  # there is no Triton but on Linux
        raise ValueError(f"--gpu-memory needs Quire's kernels for a GPU: {error.name} is not installed") from None
    from model.loading import check_division
    from rpc.engines.device_defaults import device_defaults

    check_division(config, settings.quantization, Shard(0, settings.tensor_parallel))
    scheduler = gpu.scheduler.with_defaults(*device_defaults(gpu.memory))
    sizes = StepSizes(scheduler.max_sequences, config.context, scheduler.step_tokens)
    try:
        found = estimate_device(config, settings, sizes)
    except NoKernels as error:
        raise ValueError(f"--gpu-memory: Quire's kernels for a GPU cannot run the model: {error}") from None
    images = settings.image_cache_memory if config.vision is not None else 0
    own = CONTEXT_BYTES + found.weights
    pool = MemoryFound(gpu.memory, gpu.memory, own).for_pool(
        settings.gpu_memory_utilization, found.working.total + images, 1
    )
    return {
        "gpu_bytes": gpu.memory,
        "usable_bytes": int(gpu.memory * settings.gpu_memory_utilization),
        "context_bytes": CONTEXT_BYTES,
        "weight_bytes": found.weights,
        "step_bytes": found.working.step,
        "step_tokens": sizes.tokens,
        "graph_bytes": found.working.graphs,
        "sampler_bytes": found.working.sampler,
        "image_bytes": images,
        "memory_bytes": pool,
    }


def show(directory: Path, settings: ModelSettings, length: int | None, as_json: bool, gpu: Gpu | None = None) -> None:
    """Prints the sizes as a table or as JSON. Raises as `estimate`."""
    values = estimate(directory, settings, length, gpu)
    if as_json:
        print(json.dumps(values))
        return
    table = Table(title=f"Memory of {values['model']}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key, label in LABELS.items():
        if key not in values or (key in WHERE_ANY and not values[key]):
            continue
        table.add_row(label.format(**values), _shown(key, values[key]))
    Console().print(table)


def _shown(key: str, value: int | str | None) -> str:
    if not isinstance(value, int):
        return value or "none"
    return f"{value:,} bytes, {binary(value)}" if "bytes" in key else f"{value:,}"


def binary(size: int) -> str:
    """Returns a number of bytes in the largest unit that it fills: "16.0 GiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size >= UNITS[unit[0]]), None)
    return f"{size} B" if unit is None else f"{size / UNITS[unit[0]]:.1f} {unit}"
