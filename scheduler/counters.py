"""Counters of an engine, and the stats that it reports with every step."""

from dataclasses import dataclass, field

from cache_manager.cached import Cause
from cache_manager.manager import CacheManager
from scheduler.events import EngineStats
from scheduler.preemption_cause import PreemptionCause
from scheduler.queue import Queue
from scheduler.rows import Rows


@dataclass(slots=True)
class Counters:
    """Counts since the engine's start.

    Attributes:
        steps: Steps that have run.
        computed: Tokens whose KV was computed; of these `recomputed` a second time, after a preemption.
        preemptions: Sequences that lost their rows, by cause.
        queries: Tokens of admitted sequences that were looked up in the prefix cache; of these `hits` were found.
        images_encoded: Images that were encoded.
        peak: Most pages that were held at once.
        transferred: Pages that came from other engines.
        drafted: Draft tokens that were checked; of these `accepted` were drawn too.
        jumped: Output tokens that a constraint left no choice of, and that were not drawn.
    """

    steps: int = 0
    computed: int = 0
    recomputed: int = 0
    preemptions: dict[PreemptionCause, int] = field(default_factory=lambda: dict.fromkeys(PreemptionCause, 0))
    queries: int = 0
    hits: int = 0
    images_encoded: int = 0
    peak: int = 0
    transferred: int = 0
    drafted: int = 0
    accepted: int = 0
    jumped: int = 0

    def stats(
        self, rows: Rows, queue: Queue, cache: CacheManager, waiting_seconds: float, isolated: bool
    ) -> EngineStats:
        pool, prefix, tier = cache.pool, cache.prefix, cache.pool.tier
        return EngineStats(
            running=rows.used,
            waiting=len(queue),
            waiting_tokens=queue.tokens,
            pages_used=pool.total - pool.free,
            pages_total=pool.total,
            pages_cached=prefix.cached,
            pages_shared=cache.allocator.shared,
            slots_unused=cache.slots_unused(rows.total_scheduled),
            steps=self.steps,
            computed_tokens=self.computed,
            recomputed_tokens=self.recomputed,
            preemptions=sum(self.preemptions.values()),
            prefix_queries=self.queries,
            prefix_hits=self.hits,
            evicted_capacity=prefix.evicted[Cause.CAPACITY],
            evicted_reset=prefix.evicted[Cause.RESET],
            evicted_fault=prefix.evicted[Cause.FAULT],
            lifetimes=tuple(prefix.lifetimes.tolist()),
            lifetime_seconds=prefix.lifetime_seconds,
            host_slots=tier.slots if tier else 0,
            host_slots_used=tier.used if tier else 0,
            swapped_out=tier.swapped_out if tier else 0,
            swapped_in=tier.swapped_in if tier else 0,
            swap_lost=tier.lost if tier else 0,
            imbalances=len(cache.allocator.pages_set_aside),
            pages_peak=self.peak,
            page_bytes=cache.layout.page_bytes,
            pages_if_copied=cache.tables.entries,
            images_encoded=self.images_encoded,
            isolated=int(isolated),
            waiting_seconds=waiting_seconds,
            pages_transferred=self.transferred,
            draft_tokens=self.drafted,
            accepted_tokens=self.accepted,
            jump_forward_tokens=self.jumped,
            preemptions_priority=self.preemptions[PreemptionCause.PRIORITY],
            preemptions_pages=self.preemptions[PreemptionCause.PAGES],
            preemptions_search=self.preemptions[PreemptionCause.SEARCH],
            preemptions_lost_copy=self.preemptions[PreemptionCause.LOST_COPY],
        )
