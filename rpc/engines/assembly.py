"""Where the rooms meet: a loaded model, a scheduler and an engine around them. Imports torch."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cache_manager.manager import CacheManager
from cache_manager.name_log import NameLog
from cache_manager.page_names import PageNamer
from cache_manager.policies import POLICIES
from cache_manager.tier import HostTier
from model.config import ModelConfig, read_config
from model.errors import RankLost
from model.loading import LoadedModel, choose_device, load
from model.overlapped import Overlapped
from model.parallel.shard import Shard
from model.sampling.logits_processors import LogitsProcessorFactory
from rpc.engines.follower import set_threads
from rpc.engines.group import FollowerProcesses, Followers, Group, Grouped
from rpc.engines.local import LocalEngine
from rpc.engines.pages import EnginePages
from rpc.frontend.engine_client import EngineInfo
from rpc.paths import model_directory
from rpc.settings import EngineConfig
from scheduler.engine import Sink
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import Executor

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What `assemble` makes. namer: of pages, where there is a prefix cache."""

    loaded: LoadedModel
    scheduler: Scheduler
    group: Group | None = None
    namer: PageNamer | None = None

    def engine(self, sink: Sink) -> LocalEngine:
        """The engine, not started. `sink` gets each step's outputs on the engine's thread."""
        loaded, runner = self.loaded, self.loaded.runner
        several = self.scheduler.settings.depth > 1
        executor: Executor = runner if self.group is None else Grouped(runner, self.group)
        if several and not runner.runs_ahead:
            executor = Overlapped(executor)
        info = EngineInfo(
            loaded.limits, loaded.pages, loaded.dtype, loaded.device, loaded.layout.page_size, loaded.numerics
        )
        engine = LocalEngine(self.scheduler, executor, info, sink, loaded.last_compiled)
        if self.namer is not None and self.group is None:  # ranks of a group have parts of a page each
            engine.pages = EnginePages(engine, self.scheduler, self.namer, loaded.numerics, runner.export)
        if self.group is not None:
            self.group.led.when_lost(engine.fail)
        return engine


def assemble(
    config: EngineConfig,
    followers: Callable[[EngineConfig], Followers] = FollowerProcesses,
    factories: Sequence[LogitsProcessorFactory] = (),
) -> Parts:
    """Loads everything. followers: makes the other ranks of a model that is divided. factories: of logits processors,
    beside those that the settings name.

    Raises CheckpointError or ValueError with one clear message.
    """
    set_threads(config)
    directory = model_directory(config.model.model)
    scheduling = config.scheduler
    if scheduling.steps_in_flight is None:
        scheduling = replace(scheduling, steps_in_flight=2 if choose_device(config.model.device) == "cuda" else 1)
        config = replace(config, scheduler=scheduling)
    rows = scheduling.max_sequences
    secret = bytes.fromhex(config.secret) or secrets.token_bytes(SECRET_BYTES)
    if config.model.host_cache_memory is not None and not config.cache.prefix_cache:
        raise ValueError("--host-cache-memory keeps pages of the prefix cache: it does nothing with --no-prefix-cache")
    ahead, recompute = scheduling.ahead, scheduling.recompute
    if config.model.host_cache_memory is not None and recompute:
        raise ValueError("--host-cache-memory keeps what --recompute never reads")
    check_indivisible(read_config(directory), scheduling)
    loaded, group = _load(config, directory, followers, factories)
    tier = HostTier(loaded.host_slots, len(loaded.layout.groups)) if loaded.host_slots else None
    cache = CacheManager(loaded.layout, loaded.pages, rows, POLICIES[config.cache.eviction], ahead, tier)
    named = config.cache.prefix_cache and not recompute
    if named and config.tells_names:
        cache.prefix.index.log = NameLog()
    namer = PageNamer(secret, loaded.numerics, loaded.layout.page_size) if named else None
    return Parts(loaded, Scheduler(scheduling, config.queue, cache, namer), group, namer)


def _load(
    config: EngineConfig,
    directory: Path,
    followers: Callable[[EngineConfig], Followers],
    factories: Sequence[LogitsProcessorFactory],
) -> tuple[LoadedModel, Group | None]:
    """The model, and the group where it is divided."""
    scheduling, size = config.scheduler, config.model.tensor_parallel
    load_part = partial(
        load, directory, config.model, scheduling.max_sequences, scheduling.ahead, config.request, scheduling.recompute,
        config.engines_here, factories=factories,
    )  # fmt: skip
    if size == 1:
        return load_part(), None
    Shard(0, size).check(read_config(directory))  # before anything is started
    try:
        group = Group.open(config, directory, followers(config))
        try:
            return load_part(group=group.led), group
        except BaseException:
            group.close()
            raise
    except RankLost as error:
        raise ValueError(str(error)) from None


def check_indivisible(model: ModelConfig, settings: SchedulerSettings) -> None:
    """Raises ValueError where prompts that cannot be divided do not fit in a step beside the decodes of others."""
    if model.vision is None or not model.vision.prefix_lm:
        return
    if settings.prefill_chunk is not None:
        raise ValueError(
            f"--prefill-chunk is {settings.prefill_chunk}: tokens of a prompt of {model.architecture} see each other "
            "in both directions, so that no prompt can be divided. Leave it unset"
        )
    needed = model.context + settings.max_sequences
    if settings.max_batched_tokens < needed:
        raise ValueError(
            f"--max-batched-tokens is {settings.max_batched_tokens}: a prompt of {model.architecture} cannot be "
            f"divided and may have {model.context} tokens, beside which {settings.max_sequences} sequences take one "
            f"each: serve it with --max-batched-tokens {needed}"
        )
