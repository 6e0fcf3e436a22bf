"""Metrics from the engines' stats: pages, queue and step time, of all engines of a server together."""

from collections import Counter
from functools import partial
from threading import Lock

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

COUNTED = (
    *COUNTERS,
    *(f"evicted_{cause.value}" for cause in Cause),
    *(f"preemptions_{cause}" for cause in PreemptionCause),
)
"""Fields of `EngineStats` that are counts."""

PREEMPTED_HELP = (
    "Preemptions by cause: pages (a running request lacked them), priority (for a more urgent one that waited), search "
    "(a hypothesis that waited for others), lost_copy (of the host tier)."
)


class EngineMetrics:
    """Metrics of a server's engines, summed over the engines.

    Sums are made at each scrape: an engine has hundreds of steps a second, and the event loop takes in each.

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
        self._past: Counter[str] = Counter()  # counts of engines that are gone, by field
        self._leaving = Lock()  # a scrape finds the counts of an engine that leaves either there or here
        for field, named in GAUGES.items():
            make.gauge(*named, read=partial(self._now, field))
        make.gauge("quire_kv_cache_usage_ratio", "Part of the KV pages that is held, 0 to 1.", read=self._usage)
        self._page_tokens = make.gauge("quire_kv_page_tokens", "Tokens of a KV page.")
        evicted = {cause.value: partial(self._count, f"evicted_{cause.value}") for cause in Cause}
        make.read_counters("quire_kv_pages_evicted", "Cached KV pages given up, by cause.", "cause", evicted)
        for field, (name, text) in COUNTERS.items():
            make.read_counters(name, text, "", {"": partial(self._count, field)})
        preempted = {cause.value: partial(self._count, f"preemptions_{cause}") for cause in PreemptionCause}
        make.read_counters("quire_num_preemptions_by_cause", PREEMPTED_HELP, "cause", preempted)
        self._lifetimes = make.counted(
            "quire_kv_page_lifetime_seconds", "Time from a page's publication until its place was needed.", LIFETIMES
        )
        self._starts = make.counter(
            "quire_engine_starts", "Engines that became ready: the first one, and its successors."
        )
        self._step_time = make.counted("quire_step_duration_seconds", "Time from a step's plan to its result.", STEP)
        self._overhead = make.counted(
            "quire_step_overhead_seconds", "Time to plan a step, to pack it and to take in its result.", OVERHEAD
        )

    def attached(self, pages: int, engine: int = 0, page_size: int = 16) -> None:
        """Counts the start of an engine, whose stats begin at 0.

        Args:
            pages: Count of its pages.
            engine: Number of the engine, of a first one or of a successor.
            page_size: Tokens of a page, the same for all engines.
        """
        self.gone(engine)
        self._starts.inc()
        self._page_tokens.set(page_size)
        self.last_stats[engine] = EngineStats(pages_total=pages)

    def gone(self, engine: int) -> None:
        """Takes an engine out of the gauges; the counters keep its counts."""
        with self._leaving:
            last = self.last_stats.pop(engine, EngineStats())
            for field in COUNTED:
                self._past[field] += getattr(last, field)

    def step(self, outputs: StepOutputs, engine: int = 0) -> None:
        for seconds in outputs.step_seconds:
            self._step_time.observe(seconds)
        for seconds in outputs.overheads:
            self._overhead.observe(seconds)
        self.stats(outputs.stats, engine)

    def stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Takes in the newest stats of an engine."""
        before = self.last_stats.get(engine, EngineStats())
        self.last_stats[engine] = stats
        if stats.lifetimes != before.lifetimes and stats.lifetimes:  # an engine that has just come has none
            old = before.lifetimes or (0,) * len(stats.lifetimes)
            more_lived = [max(0, n - m) for n, m in zip(stats.lifetimes, old, strict=True)]
            self._lifetimes.add(more_lived, max(0.0, stats.lifetime_seconds - before.lifetime_seconds))

    def _now(self, field: str) -> int:
        """Returns a gauge's value: the sum over engines, which all have pages of one size."""
        values = [getattr(stats, field) for stats in list(self.last_stats.values())]
        return max(values, default=0) if field == "page_bytes" else sum(values)

    def _usage(self) -> float:
        total = self._now("pages_total")
        return self._now("pages_used") / total if total else 0.0

    def _count(self, field: str) -> int:
        """Returns a counter's value, over engines that are gone too."""
        with self._leaving:
            return self._past[field] + sum(getattr(stats, field) for stats in list(self.last_stats.values()))
