"""Makes an engine's scheduler, with its cache manager and its recorder. Imports no torch."""

import secrets

from cache_manager.block_hash import BlockHasher
from cache_manager.kv_events import KVEventLog
from rpc.engines.recordings import start_recorder
from rpc.settings import EngineConfig
from scheduler.blueprint import Blueprint
from scheduler.recording import RecordedScheduler
from scheduler.scheduler import Scheduler

SECRET_BYTES = 32


def make_scheduler(config: EngineConfig, blueprint: Blueprint, numerics: bytes) -> tuple[Scheduler, BlockHasher | None]:
    """Returns a scheduler, and the hasher of its pages, None without a prefix cache.

    Args:
        config: Configuration of the engine.
        blueprint: Blueprint of the scheduler.
        numerics: Everything that the numbers in a page depend on, beside tokens.

    Raises:
        OSError: The file of the recording cannot be made.
    """
    secret = bytes.fromhex(config.secret) or secrets.token_bytes(SECRET_BYTES)
    cache, hashed = blueprint.cache(), blueprint.prefix_cache
    if hashed and config.publishes_kv_events:
        cache.prefix.index.log = KVEventLog()
    hasher = BlockHasher(secret, numerics, blueprint.layout.page_size) if hashed else None
    recorder = start_recorder(blueprint, config.record)
    if recorder is None:
        return blueprint.scheduler(cache, hasher), hasher
    return RecordedScheduler(blueprint, cache, hasher, recorder), hasher


def check_settings(config: EngineConfig, processors: bool) -> None:
    """Raises ValueError where settings of an engine contradict each other.

    Args:
        config: Configuration of the engine.
        processors: Whether it has logits processors of users.
    """
    scheduling = config.scheduler
    if config.model.host_cache_memory is not None and not config.cache.prefix_cache:
        raise ValueError("--host-cache-memory keeps pages of the prefix cache: it does nothing with --no-prefix-cache")
    if config.model.host_cache_memory is not None and scheduling.recompute:
        raise ValueError("--host-cache-memory keeps what --recompute never reads")
    if scheduling.draft_tokens and scheduling.recompute:
        raise ValueError("--speculative-tokens does not go with --recompute, which computes all tokens at each step")
    if scheduling.draft_tokens and processors:
        raise ValueError(
            "--speculative-tokens does not go with --logits-processors: a processor's row draws one token at a time"
        )
    if scheduling.draft_tokens and config.record.file is not None and not config.record.tokens:
        raise ValueError(
            "--record with --speculative-tokens needs --record-tokens: draft tokens are guessed from tokens that the "
            "recording does not have otherwise"
        )
