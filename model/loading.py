"""From a model directory to what an engine runs: config, weights, KV pool, runner. Everything that can be wrong with a
checkpoint is found here, before a port opens.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cache_manager.layout import KVLayout
from model.architectures.registry import load_model
from model.backends import Backend, choose_backend
from model.config import ModelConfig, read_config, read_defaults
from model.decoder import Decoder
from model.errors import CheckpointError
from model.identity import checkpoint_identity
from model.images import ImageStore
from model.memory import free_bytes, free_host_bytes, pool_pages
from model.page_store import PageStore
from model.progress import progress_bar
from model.runner import Runner
from model.settings import ModelSettings
from model.verify import MANIFEST, verify_files
from model.weights import Checkpoint, weight_files
from scheduler.limits import Limits, ModelDefaults
from scheduler.settings import RequestLimits

log = logging.getLogger("quire.model")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """What `load` makes. pages: size of the KV pool. host_slots: pages that fit in the host tier, 0 without. numerics:
    what the numbers in a page depend on beside tokens.
    """

    config: ModelConfig
    defaults: ModelDefaults
    limits: Limits
    layout: KVLayout
    pages: int
    host_slots: int
    dtype: str
    device: str
    numerics: bytes
    runner: Runner


def load(
    directory: Path,
    settings: ModelSettings,
    rows: int,
    ahead: int,
    request_limits: RequestLimits,
    recompute: bool = False,
    share: float = 1.0,
) -> LoadedModel:
    """rows: sequences that run at once. ahead: tokens of one of them that steps in flight compute at most. recompute:
    as in `Runner`. share: of the memory that one of several engines takes where nobody says how much. Raises
    CheckpointError for a checkpoint that cannot be served, ValueError for settings that cannot be met.
    """
    if settings.verify_weights:
        _verify(directory)
    config = read_config(directory)
    defaults = read_defaults(directory, config)
    device = choose_device(settings.device)
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with torch.inference_mode():
        kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
        backend = choose_backend(config, settings, dtype, kv_dtype, device)
        decoder = _load_weights(directory, config, settings, torch_dtype, torch.device(device), backend)
        windowed = config.kv_layout(settings.page_size, kv_dtype)
        # What is computed again needs its place again, also behind a window.
        layout = replace(windowed, windows=()) if recompute else windowed
        free, fraction = free_bytes(device)
        memory = int(free * fraction * share) if settings.kv_cache_memory is None else settings.kv_cache_memory
        if memory > free:
            raise ValueError(f"--kv-cache-memory is {memory} bytes, only {free} are free")
        pages = pool_pages(layout, memory, rows * config.context)
        # One page more than the scheduler knows of, for the runner's own use.
        attention = backend.attention(config, windowed, pages + 1)
        model = backend.model(decoder, attention, rows, config.context)
        if settings.poison_freed_pages:
            attention.poison(np.arange(pages, dtype=np.int32))
    tokens = layout.tokens_in(pages)
    longest = layout.tokens_in(pages, ahead)
    log.info(
        "KV cache: %d pages of %d tokens = %d tokens, %d bytes a token, %.1f MiB (%s, %s attention)",
        pages, layout.page_size, tokens, layout.token_bytes, pages * layout.page_bytes / 2**20, kv_dtype,
        attention.name,
    )  # fmt: skip
    numbers = f"{dtype} {settings.quantization} {kv_dtype} {device} {backend.numerics} {layout}"
    numerics = checkpoint_identity(directory) + numbers.encode()
    slots, store = 0, None
    if settings.host_cache_memory is not None:
        left = free - pages * layout.page_bytes if device == "cpu" else free_host_bytes()
        slots = _host_slots(settings.host_cache_memory, left, layout)
        store = PageStore(attention, slots, layout.page_bytes, numerics, pinned=device == "cuda")
        log.info("Host tier: %d pages, %.1f MiB", slots, slots * layout.page_bytes / 2**20)
    images = None
    if model.vision is not None:
        images = ImageStore(model.vision, torch.device(device), settings.image_cache_memory)
    limits = Limits(config.vocabulary, config.context, longest, rows, request_limits)
    poison = settings.poison_freed_pages
    runner = Runner(
        model, attention, layout, rows, torch.device(device), pages, poison, store, recompute, images,
        backend.logit_ops, backend.starter,
    )  # fmt: skip
    try:
        runner.probe()
    except Exception as error:  # whatever torch makes of a config that fits the weights and is still wrong
        raise CheckpointError(f"{directory} was loaded but cannot compute a token: {error}") from None
    return LoadedModel(config, defaults, limits, layout, pages, slots, dtype, device, numerics, runner)


def _verify(directory: Path) -> None:
    """Raises CheckpointError."""
    files = weight_files(directory)
    with progress_bar("verifying weights", sum(path.stat().st_size for path in files)) as progress:
        checked = verify_files(directory, files, progress)
    if checked:
        log.info("%d files have the sums of %s", checked, MANIFEST)
    else:
        log.warning("%s has no %s: its files were not checked, only their values will be", directory, MANIFEST)


def _load_weights(
    directory: Path,
    config: ModelConfig,
    settings: ModelSettings,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
) -> Decoder:
    with progress_bar("loading weights", sum(path.stat().st_size for path in weight_files(directory))) as progress:
        checkpoint = Checkpoint(directory, settings.verify_weights, progress)
        return load_model(config, checkpoint, dtype, device, settings.quantization, backend.maker)


def _host_slots(memory: int, free: int, layout: KVLayout) -> int:
    """Pages in so many bytes of host memory, of which so many are free. Raises ValueError."""
    if memory > free:
        raise ValueError(f"--host-cache-memory is {memory} bytes, only {free} are free beside the KV pool")
    if memory < layout.page_bytes * len(layout.groups):
        raise ValueError(
            f"--host-cache-memory is {memory} bytes, one page of {layout.page_size} tokens takes {layout.page_bytes}"
        )
    return memory // layout.page_bytes


def choose_device(name: str) -> str:
    """cpu or cuda. Raises ValueError for what is neither, nor auto, or is not here."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no CUDA device")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}, must be auto, cpu or cuda")
    return name
