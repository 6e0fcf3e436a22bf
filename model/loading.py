"""Loading: from a model directory to what an engine runs: config, weights, KV pool, runner.

A checkpoint that cannot be served is refused here, before a port opens.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cache_manager.layout import KVLayout
from model.architectures.registry import load_model
from model.attention.backend import AttentionBackend
from model.backend import Backend, StepSizes
from model.backends import choose_backend
from model.config import ModelConfig, read_config
from model.decoder import Decoder
from model.errors import CheckpointError, RankLost
from model.forward import Model
from model.generation_config import read_ends
from model.gguf.split import is_gguf
from model.gguf_weights import open_checkpoint
from model.host_copies import CudaCopies
from model.host_memory import PageLocking
from model.identity import checkpoint_identity
from model.images import ImageStore
from model.memory import MemoryFound, check_size, free_host_bytes, pool_pages, return_freed_memory
from model.page_store import PageStore, Store
from model.parallel.collective import ONE_RANK, Ranks
from model.parallel.follow import ShardParts
from model.parallel.lead import RankGroupAttention, RankGroupModel, RankGroupStore
from model.parallel.members import RankGroup
from model.parallel.shard import Shard
from model.progress import progress_bar
from model.runner import Runner
from model.sampling.logits_processors import LogitsProcessorFactory, NamedFactory, load_factories
from model.sampling.readiness import FactoryReadiness
from model.sampling.sources import ProcessorSources
from model.settings import ALONE, ModelSettings, Sharing
from model.structured.grammar_store import GrammarStore
from model.verify import MANIFEST, verify_files
from model.weight_formats.registry import open_weight_format
from model.weights import weight_files
from scheduler.limits import Limits
from scheduler.settings import DEFAULT_STEP_TOKENS, RequestLimits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("quire.model")

MOST_NAMED = 500  # bytes of what a rank computes with, in messages


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A loaded model.

    Attributes:
        pages: Pages of the KV pool.
        host_slots: Pages that fit in the host tier, 0 without one.
        numerics: Everything that the numbers in a page depend on, beside tokens.
        layout: Layout of the KV pool; with several ranks, of this rank's part.
        last_compiled: Returns when, on the monotonic clock, a kernel was compiled last.
        readiness: Asks whether the logits processors of requests can be made.
    """

    config: ModelConfig
    limits: Limits
    layout: KVLayout
    pages: int
    host_slots: int
    dtype: str
    device: str
    numerics: bytes
    runner: Runner
    last_compiled: Callable[[], float]
    readiness: FactoryReadiness


@dataclass(frozen=True, slots=True, eq=False)
class Computer:
    """One rank's part of a model, of its KV pool and of its host tier.

    Attributes:
        pages: Pages of the pool that the scheduler knows, the same number in all ranks. The pool has one more.
        host_slots: Pages that fit in the host tier, the same number in all ranks.
    """

    config: ModelConfig
    model: Model
    attention: AttentionBackend
    layout: KVLayout
    pages: int
    host_slots: int
    store: PageStore | None
    dtype: str
    device: torch.device
    numerics: bytes
    backend: Backend

    @property
    def parts(self) -> ShardParts:
        """The parts that a follower computes with."""
        return ShardParts(self.model, self.attention, self.store, getattr(torch, self.dtype), self.device)


def load(
    directory: Path,
    settings: ModelSettings,
    rows: int,
    ahead: int,
    request_limits: RequestLimits,
    recompute: bool = False,
    engines: Sharing = ALONE,
    group: RankGroup | None = None,
    step_tokens: int = DEFAULT_STEP_TOKENS,
    factories: Sequence[LogitsProcessorFactory] = (),
) -> LoadedModel:
    """Loads a model for an engine.

    Args:
        directory: Directory of the checkpoint, or its GGUF file.
        settings: Settings of the model.
        rows: Sequences that run at once.
        ahead: Tokens of one sequence that the steps in flight compute at most.
        request_limits: Limits of one request, from the settings.
        recompute: See `Runner`.
        engines: Engines that share memory, where no setting says how much one takes.
        group: The other ranks, which load their parts meanwhile. None for a model that is not divided.
        step_tokens: Most tokens of a step.
        factories: Factories of logits processors, applied after those that the settings name.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        ValueError: A setting cannot be met.
        RankLost: Another rank has ended.
    """
    named = [*load_factories(settings.logits_processors), *map(NamedFactory.of, factories)]
    if settings.verify_weights:
        _verify(directory)
    grammars = _grammars(directory)  # reads the tokenizer while the weights are loaded
    ranks = ONE_RANK if group is None else group.ranks
    computer = load_computer(directory, settings, rows, recompute, engines, ranks, step_tokens)
    config, layout, device = computer.config, computer.layout, computer.device
    sources = ProcessorSources(named, grammars if grammars is not None and grammars.opened() else None)
    limits = Limits(
        config.vocabulary,
        config.context,
        layout.tokens_in(computer.pages, ahead),
        rows,
        request_limits,
        tuple(one.name for one in named),
        sources.grammars is not None,
    )
    images = None
    if computer.model.vision is not None:
        images = ImageStore(computer.model.vision, device, settings.image_cache_memory)
    model, attention, starter = computer.model, computer.attention, computer.backend.starter
    store: Store | None = computer.store
    if group is not None:
        attention, model = RankGroupAttention(attention, group), RankGroupModel(model, group, layout.page_size)
        starter = starter if group.collective.runs_ahead else None
        store = None if store is None else RankGroupStore(store, group)
    runner = Runner(
        model, attention, layout, rows, device, computer.pages, settings.poison_freed_pages, store, recompute, images,
        computer.backend.logit_ops, starter, sources, config.rotary_axes,
    )  # fmt: skip
    try:
        runner.probe()
    except RankLost:
        raise
    except Exception as error:  # whatever torch makes of a config that fits the weights and is still wrong
        raise CheckpointError(f"{directory} was loaded but cannot compute a token: {error}") from None
    if group is not None:
        group.started()
    return LoadedModel(
        config, limits, layout, computer.pages, computer.host_slots, computer.dtype,
        device.type, computer.numerics, runner, computer.backend.last_compiled, FactoryReadiness(sources),
    )  # fmt: skip


def _grammars(directory: Path) -> GrammarStore | None:
    """Returns an empty store of grammars; None for a model without an end token."""
    config = read_config(directory)
    ends = read_ends(directory, config)

    def vocabulary() -> "LLTokenizer":
        from model.structured.vocabulary import load_vocabulary  # an engine runs without the tokenizers' libraries too

        return load_vocabulary(directory, config.vocabulary, ends)

    return GrammarStore(vocabulary, torch.get_num_threads()) if ends else None


def load_computer(
    directory: Path, settings: ModelSettings, rows: int, recompute: bool, engines: Sharing, ranks: Ranks,
    step_tokens: int = DEFAULT_STEP_TOKENS,
) -> Computer:  # fmt: skip
    """Loads a rank's part of the model, of its KV pool and of its host tier.

    `engines`, `step_tokens` and errors are those of `load`.
    """
    config = read_config(directory)
    check_division(config, settings.quantization, ranks.shard)
    own = ranks.shard.of(config)
    device = choose_device(settings.device)
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with torch.inference_mode():
        kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
        backend = choose_backend(config, settings, dtype, kv_dtype, device, ranks)
        decoder = _load_weights(directory, config, settings, torch_dtype, torch.device(device), backend, ranks)
        return_freed_memory()  # before free memory is measured: the KV pool may have it
        windowed = own.kv_layout(settings.page_size, kv_dtype)
        # Tokens that are computed again need their place again, also behind a window.
        layout = windowed.without_windows() if recompute else windowed
        sizes = StepSizes(rows, config.context, step_tokens)
        # Also where the pool's size is set: it compiles the kernels of steps, and a step that does not fit is told.
        working = _working_memory(directory, settings, backend, decoder, own, windowed, sizes)
        degree = f" 1/{ranks.shard.size}" if ranks.shard.size > 1 else ""
        numbers = f"{dtype} {settings.quantization} {kv_dtype} {device} {backend.numerics} {layout}{degree}"
        numerics = checkpoint_identity(directory) + numbers.encode()
        pages, slots = _agree(settings, layout, rows * config.context, device, numerics, engines, ranks, working)
        # One page more than the scheduler knows of, for the runner's own use.
        attention = backend.attention(own, windowed, pages + 1)
        model = backend.model(decoder, attention, sizes)
        if settings.poison_freed_pages:
            attention.poison(np.arange(pages, dtype=np.int32))
    log.info(
        "KV cache: %d pages of %d tokens = %d tokens, %d bytes a token, %.1f MiB (%s, %s attention)",
        pages, layout.page_size, layout.tokens_in(pages), layout.token_bytes, pages * layout.page_bytes / 2**20,
        kv_dtype, attention.name,
    )  # fmt: skip
    store = None
    if settings.host_cache_memory is not None:
        on_cuda = device == "cuda"
        locking = PageLocking.of_cuda() if on_cuda else None
        copies = CudaCopies(torch.device(device)) if on_cuda else None
        store = PageStore(attention, slots, layout.page_bytes, numerics, locking, copies)
        log.info("Host tier: %d pages, %.1f MiB", slots, slots * layout.page_bytes / 2**20)
    ranks.exchange({})  # one that fails until here is met now, not in the first collective, which would wait for it
    return Computer(
        config, model, attention, layout, pages, slots, store, dtype, torch.device(device), numerics, backend
    )


def _working_memory(
    directory: Path, settings: ModelSettings, backend: Backend, decoder: Decoder, config: ModelConfig,
    layout: KVLayout, sizes: StepSizes,
) -> int:  # fmt: skip
    """Returns the bytes that steps take beside weights and KV. Raises CheckpointError or ValueError."""
    try:
        working = backend.working_memory(decoder, config, layout, sizes)
    except RankLost:
        raise
    except torch.OutOfMemoryError:
        raise ValueError(
            f"a step of {sizes.tokens} tokens and {sizes.rows} sequences does not fit beside the weights on the GPU. "
            "Lower --max-batched-tokens or --max-sequences"
        ) from None
    except Exception as error:  # as in `load`
        raise CheckpointError(f"{directory} was loaded but cannot compute a step: {error}") from None
    return working + (settings.image_cache_memory if decoder.vision is not None else 0)


def check_division(config: ModelConfig, quantization: str | None, shard: Shard) -> None:
    """Raises ValueError where the heads, or blocks of the weight format, cannot be divided among the ranks."""
    weights = open_weight_format(config, quantization)
    rows, columns = weights.blocks
    why = f", {weights.name} keeps {rows} outputs and {columns} inputs together" if rows * columns > 1 else ""
    # Queries are outputs of one product and inputs of the next, keys are outputs alone.
    shard.check(config, lcm(rows, columns), rows, why)


def _agree(
    settings: ModelSettings,
    layout: KVLayout,
    most_tokens: int,
    device: str,
    numerics: bytes,
    engines: Sharing,
    ranks: Ranks,
    working: int,
) -> tuple[int, int]:
    """Returns the pages of the KV pool and slots of the host tier that every rank can have. Raises ValueError."""
    ranks.exchange({})  # all have their weights: what is free now stays so
    # Ranks of one machine share its memory. Where they do not, this is too careful; --kv-cache-memory says how much.
    sharing = engines.host * ranks.shard.size if device == "cpu" else engines.gpu
    found = MemoryFound.of(device)
    if settings.kv_cache_memory is None:
        memory = found.for_pool(settings.gpu_memory_utilization, working, sharing)
    else:
        memory = settings.kv_cache_memory
        on_host = (ranks.shard.size, engines.host) if device == "cpu" else (1, 1)
        check_size("--kv-cache-memory", memory, found.free, *on_host)
    pages, slots = pool_pages(layout, memory, most_tokens), 0
    if settings.host_cache_memory is not None:
        free = found.free - ranks.shard.size * pages * layout.page_bytes if device == "cpu" else free_host_bytes()
        slots = _host_slots(settings.host_cache_memory, free, layout, ranks.shard.size, engines.host)
    said = ranks.exchange(words_of(numerics, pages, slots))
    for rank, other in enumerate(said):
        if other["numerics"] != said[0]["numerics"]:
            raise ValueError(f"rank {rank} computes with {other['named']}, rank 0 with {said[0]['named']}")
    return min(other["pages"] for other in said), min(other["slots"] for other in said)


def words_of(numerics: bytes, pages: int, slots: int) -> Mapping[str, Any]:
    """Returns what a rank says of itself before the first step.

    Args:
        numerics: What it computes with, behind a digest of its checkpoint. It is cut off for messages: with the layout
            of a model with many recurrent layers it takes 600 KB.
        pages: Pages of the KV pool that it has room for.
        slots: Slots of the host tier, likewise.
    """
    named = numerics[32 : 32 + MOST_NAMED].decode(errors="replace")
    return {"numerics": hashlib.sha256(numerics).hexdigest(), "named": named, "pages": pages, "slots": slots}


def _verify(directory: Path) -> None:
    """Raises CheckpointError."""
    files = weight_files(directory)
    directory = directory.parent if is_gguf(directory) else directory
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
    ranks: Ranks,
) -> Decoder:
    with progress_bar("loading weights", sum(path.stat().st_size for path in weight_files(directory))) as progress:
        checkpoint = open_checkpoint(directory, config, settings.verify_weights, progress)
        decoder = load_model(config, checkpoint, dtype, device, settings.quantization, backend.maker, ranks)
    return replace(decoder, vision=None) if ranks.shard.rank else decoder  # rank 0 encodes images for all


def _host_slots(memory: int, free: int, layout: KVLayout, ranks: int, engines: int) -> int:
    """Returns the pages that fit in `memory` bytes of the host. Raises ValueError as `check_size` does."""
    check_size("--host-cache-memory", memory, free, ranks, engines)
    if memory < layout.page_bytes * layout.tables:
        raise ValueError(
            f"--host-cache-memory is {memory} bytes, one page of {layout.page_size} tokens takes {layout.page_bytes}, "
            f"a sequence {layout.tables} of them"
        )
    return memory // layout.page_bytes


def choose_device(name: str) -> str:
    """Returns "cpu" or "cuda".

    Raises:
        ValueError: The name is neither, nor "auto", or the device is not here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no CUDA device")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}, must be auto, cpu or cuda")
    return name
