"""Assembles an engine from a loaded model, a cache manager and a scheduler. Imports torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cache_manager.block_hash import BlockHasher
from model.config import ModelConfig, read_config
from model.errors import RankLost
from model.loading import LoadedModel, load
from model.overlapped import Overlapped
from model.parallel.shard import Shard
from model.sampling.logits_processors import LogitsProcessorFactory
from model.simulated.naming import is_simulated
from rpc.engines.device_defaults import device_settings
from rpc.engines.follower import set_threads
from rpc.engines.group import EngineGroup, FollowerProcesses, Followers, GroupExecutor
from rpc.engines.local import LocalEngine
from rpc.engines.pages import EnginePages
from rpc.engines.scheduling import check_settings, make_scheduler
from rpc.frontend.engine_client import EngineInfo
from rpc.paths import model_directory
from rpc.settings import EngineConfig
from scheduler.blueprint import Blueprint
from scheduler.engine import Sink
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import Executor


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """Parts of an engine, as `assemble` makes them.

    Attributes:
        loaded: The loaded model.
        scheduler: The scheduler with its cache manager.
        group: The rank group of a model that is divided; None otherwise.
        hasher: Hashes pages; None without a prefix cache.
    """

    loaded: LoadedModel
    scheduler: Scheduler
    group: EngineGroup | None = None
    hasher: BlockHasher | None = None

    def close(self) -> None:
        """Frees the memory of parts that become no engine."""
        _close(self.loaded, self.group)

    def engine(self, sink: Sink, senders_help: bool = True) -> LocalEngine:
        """Returns the engine, not started; arguments as of `Engine`."""
        loaded, runner = self.loaded, self.loaded.runner
        several = self.scheduler.settings.depth > 1
        executor: Executor = runner if self.group is None else GroupExecutor(runner, self.group)
        if several and not runner.runs_ahead:
            executor = Overlapped(executor)
        info = EngineInfo(
            loaded.limits, loaded.pages, loaded.dtype, loaded.device, loaded.layout.page_size, loaded.numerics
        )
        engine = LocalEngine(self.scheduler, executor, info, sink, loaded.last_compiled, loaded.readiness, senders_help)
        if self.hasher is not None and self.group is None:  # a rank of a group has only a part of each page
            engine.pages = EnginePages(engine, self.scheduler, self.hasher, loaded.numerics, runner.export)
        if self.group is not None:
            self.group.ranks.when_lost(engine.fail)
        return engine


def assemble(
    config: EngineConfig,
    followers: Callable[[EngineConfig], Followers] = FollowerProcesses,
    factories: Sequence[LogitsProcessorFactory] = (),
) -> EngineParts:
    """Loads a model, and makes the parts of an engine around it.

    Args:
        config: Configuration of the engine.
        followers: Makes ranks 1 and up of a model that is divided.
        factories: Factories of logits processors, beside those that the settings name.

    Raises:
        CheckpointError: The model's files cannot be used.
        ValueError: The configuration does not fit the model or the machine.
    """
    if is_simulated(config.model.model):
        raise ValueError(f"--model {config.model.model} is simulated, and has no weights: only `quire serve` runs it")
    set_threads(config)
    directory = model_directory(config.model.model)
    scheduling = device_settings(config)
    config = replace(config, scheduler=scheduling)
    check_settings(config, bool(factories or config.model.logits_processors))
    model = read_config(directory)
    if scheduling.draft_tokens and model.recurrent:
        raise ValueError(
            "--speculative-tokens does not go with a model that has recurrent layers: their state cannot lose a draft"
        )
    check_indivisible(model, scheduling)
    loaded, group = _load(config, directory, followers, factories)
    hashed = config.cache.prefix_cache and not scheduling.recompute
    blueprint = Blueprint(
        scheduling, config.queue, loaded.layout, loaded.pages, config.cache.eviction, loaded.host_slots, hashed,
        loaded.readiness.asks_factories,
    )  # fmt: skip
    try:
        scheduler, hasher = make_scheduler(config, blueprint, loaded.numerics)
    except BaseException:
        _close(loaded, group)
        raise
    return EngineParts(loaded, scheduler, group, hasher)


def _close(loaded: LoadedModel, group: EngineGroup | None) -> None:
    """Frees the memory of a model that gets no engine, that of its rank group's processes too."""
    loaded.runner.close()
    if group is not None:
        group.close()


def _load(
    config: EngineConfig,
    directory: Path,
    followers: Callable[[EngineConfig], Followers],
    factories: Sequence[LogitsProcessorFactory],
) -> tuple[LoadedModel, EngineGroup | None]:
    """Loads the model, and opens its rank group first where it is divided."""
    scheduling, size = config.scheduler, config.model.tensor_parallel
    load_part = partial(
        load, directory, config.model, scheduling.max_sequences, scheduling.ahead, config.request, scheduling.recompute,
        config.sharing, step_tokens=scheduling.step_tokens, factories=factories,
    )  # fmt: skip
    if size == 1:
        return load_part(), None
    Shard(0, size).check(read_config(directory))  # before a follower is started, so that the error is this one
    try:
        group = EngineGroup.open(config, directory, followers(config))
        try:
            return load_part(group=group.ranks), group
        except BaseException:
            group.close()
            raise
    except RankLost as error:
        raise ValueError(str(error)) from None


def check_indivisible(model: ModelConfig, settings: SchedulerSettings) -> None:
    """Raises ValueError where a prompt that cannot be divided may not fit in a step beside the decodes of others."""
    if model.vision is None or not model.vision.prefix_lm:
        return
    if settings.prefill_chunk is not None:
        raise ValueError(
            f"--prefill-chunk is {settings.prefill_chunk}: {model.architecture} attends to a prompt bidirectionally, "
            "so no prompt can be computed in chunks. Leave it unset"
        )
    needed = model.context + settings.max_sequences
    if settings.step_tokens < needed:
        raise ValueError(
            f"--max-batched-tokens is {settings.step_tokens}: a prompt of {model.architecture} cannot be "
            f"divided and may have {model.context} tokens, beside which {settings.max_sequences} sequences take one "
            f"each: serve it with --max-batched-tokens {needed}"
        )
