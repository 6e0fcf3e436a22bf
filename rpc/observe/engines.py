"""Metrics from the engines' stats: pages, queue and step time, of all engines of a server together."""

from prometheus_client import CollectorRegistry

from cache_manager.cached import LIFETIMES, Cause
from rpc.observe.families import Families
from scheduler.events import EngineStats, StepOutputs
from scheduler.preemption_cause import PreemptionCause

STEP = (.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10)  # fmt: skip
OVERHEAD = (.00005, .0001, .0002, .0005, .001, .002, .005, .01, .02, .05)  # fmt: skip

GAUGES = {
    "running": ("quire_num_requests_running", "Sequences that have a batch row; a request can have several."),
    "waiting": ("quire_num_requests_waiting", "Requests in the queue."),
    "waiting_tokens": ("quire_num_tokens_waiting", "Prompt tokens in the queue."),
    "pages_used": ("quire_kv_pages_used", "KV pages held by sequences and steps in flight."),
    "pages_peak": ("quire_kv_pages_used_peak", "Most KV pages that each engine has held at once, added up."),
    "pages_total": ("quire_kv_pages", "KV pages in the pool."),
    "page_bytes": ("quire_kv_page_bytes", "Bytes of one KV page."),
    "pages_cached": ("quire_kv_pages_cached", "KV pages that no row holds, kept for prompts that start alike."),
    "pages_shared": ("quire_kv_pages_shared", "KV pages that several sequences hold."),
    "pages_if_copied": (
        "quire_kv_pages_if_copied",
        "KV pages that sequences would hold if each had copies of those that it shares.",
    ),
    "slots_unused": ("quire_kv_slots_unused", "Token slots in running sequences' pages that hold no token yet."),
    "host_slots": ("quire_kv_host_pages", "KV pages that fit in the host tier."),
    "host_slots_used": ("quire_kv_host_pages_used", "KV pages that have a copy in the host tier."),
}
"""Name and help text of each gauge, by field of `EngineStats`."""

COUNTERS = {
    "prefix_queries": ("quire_prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("quire_prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "swapped_out": ("quire_kv_pages_swapped_out", "KV pages copied to the host tier."),
    "swapped_in": ("quire_kv_pages_swapped_in", "KV pages copied back from the host tier."),
    "swap_lost": (
        "quire_kv_pages_swap_lost",
        "KV pages whose copy in the host tier had changed; they are computed anew.",
    ),
    "pages_transferred": (
        "quire_kv_pages_transferred",
        "KV pages transferred from another engine, whose streams came here.",
    ),
    "imbalances": (
        "quire_kv_ledger_imbalances",
        "KV pages whose count of holders the ledger found wrong; they are set aside.",
    ),
    "steps": ("quire_engine_steps", "Steps that the engine has finished."),
    "computed_tokens": ("quire_computed_tokens", "Tokens whose KV was computed, recomputed ones included."),
    "recomputed_tokens": ("quire_recomputed_tokens", "Tokens whose KV a preemption threw away."),
    "preemptions": ("quire_num_preemptions", "Sequences that lost their pages, and compute them anew."),
    "draft_tokens": ("quire_spec_decode_draft_tokens", "Draft tokens that were computed and checked."),
    "accepted_tokens": ("quire_spec_decode_accepted_tokens", "Draft tokens that the model drew too."),
    "jump_forward_tokens": (
        "quire_jump_forward_tokens",
        "Output tokens that a constraint left no choice of, and that were not drawn.",
    ),
    "images_encoded": ("quire_images_encoded", "Images that were encoded; one for each content."),
}
"""Name and help text of each counter, by field of `EngineStats`."""

PREEMPTED_HELP = (
    "Preemptions by cause: pages (a running request lacked them), priority (for a more urgent one that waited), search "
    "(a hypothesis that waited for others), lost_copy (of the host tier)."
)


class EngineMetrics:
    """Metrics of a server's engines, summed over the engines.

    Args:
        registry: Registry of the metrics.
        model_name: Value of the label model_name.

    Attributes:
        make: Makes the families, and has them by name.
        last_stats: Last stats of each attached engine, by number.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.make = make = Families(registry, model_name)
        self.last_stats: dict[int, EngineStats] = {}
        self._gauge_values: dict[str, int] = {}  # as last set: most do not change from step to step
        self._gauges = {field: make.gauge(*named) for field, named in GAUGES.items()}
        self._usage = make.gauge("quire_kv_cache_usage_ratio", "Part of the KV pages that is held, 0 to 1.")
        self._page_tokens = make.gauge("quire_kv_page_tokens", "Tokens of a KV page.")
        causes = [cause.value for cause in Cause]
        evicted = make.counters("quire_kv_pages_evicted", "Cached KV pages given up, by cause.", "cause", causes)
        self._counters = {field: make.counter(*named) for field, named in COUNTERS.items()}
        self._counters |= {f"evicted_{cause}": counter for cause, counter in evicted.items()}
        preempted = make.counters("quire_num_preemptions_by_cause", PREEMPTED_HELP, "cause", list(PreemptionCause))
        self._counters |= {f"preemptions_{cause}": counter for cause, counter in preempted.items()}
        self._lifetimes = make.counted(
            "quire_kv_page_lifetime_seconds", "Time from a page's publication until its place was needed.", LIFETIMES
        )
        self._starts = make.counter(
            "quire_engine_starts", "Engines that became ready: the first one, and its successors."
        )
        self._step_time = make.histogram("quire_step_duration_seconds", "Time from a step's plan to its result.", STEP)
        self._overhead = make.histogram(
            "quire_step_overhead_seconds", "Time to plan a step, to pack it and to take in its result.", OVERHEAD
        )

    def attached(self, pages: int, engine: int = 0, page_size: int = 16) -> None:
        """Counts the start of an engine, whose stats begin at 0.

        Args:
            pages: Count of its pages.
            engine: Number of the engine, of a first one or of a successor.
            page_size: Tokens of a page, the same for all engines.
        """
        self._starts.inc()
        self._page_tokens.set(page_size)
        self.stats(EngineStats(pages_total=pages), engine)

    def gone(self, engine: int) -> None:
        """Takes an engine out of the gauges; the counters keep its counts."""
        self.last_stats.pop(engine, None)
        self._set_gauges()

    def step(self, outputs: StepOutputs, engine: int = 0) -> None:
        for seconds in outputs.step_seconds:
            self._step_time.observe(seconds)
        for seconds in outputs.overheads:
            self._overhead.observe(seconds)
        self.stats(outputs.stats, engine)

    def stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Sets the gauges to the sums over all engines, and adds the growth of an engine's counts to the counters."""
        before = self.last_stats.get(engine, EngineStats())
        self.last_stats[engine] = stats
        self._set_gauges()
        for name, counter in self._counters.items():
            if (more := getattr(stats, name) - getattr(before, name)) > 0:
                counter.inc(more)
        if stats.lifetimes != before.lifetimes and stats.lifetimes:  # an engine that has just come has none
            old = before.lifetimes or (0,) * len(stats.lifetimes)
            more_lived = [max(0, n - m) for n, m in zip(stats.lifetimes, old, strict=True)]
            self._lifetimes.add(more_lived, max(0.0, stats.lifetime_seconds - before.lifetime_seconds))

    def _set_gauges(self) -> None:
        engines = list(self.last_stats.values())
        for name, gauge in self._gauges.items():
            values = [getattr(engine, name) for engine in engines]
            now = max(values, default=0) if name == "page_bytes" else sum(values)
            if self._gauge_values.get(name) != now:
                self._gauge_values[name] = now
                gauge.set(now)
        used, total = self._gauge_values["pages_used"], self._gauge_values["pages_total"]
        self._usage.set(used / total if total else 0.0)
