"""Prometheus metrics, in a registry of their own, served over HTTP on a port of their own.

Delivered tokens, latencies and outcomes come from request streams; pages, queue and step time from the engine's stats.
Nothing here can raise into a step: it runs on the frontend's loop.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from cache_manager.cached import LIFETIMES, Cause
from rpc.observe.histogram import CountedHistogram
from scheduler.events import EngineStats, StepOutputs

TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL = (
    .002, .004, .006, .008, .01, .015, .02, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80,
)  # fmt: skip
PHASES = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, *PHASES)
STEP = (.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10)  # fmt: skip
OVERHEAD = (.00005, .0001, .0002, .0005, .001, .002, .005, .01, .02, .05)  # fmt: skip
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
OUTCOMES = (
    "stop", "length", "deadline", "aborted", "cancelled", "invalid_field", "not_supported", "model_not_found",
    "request_id_live", "no_token_left", "queue_full", "queue_timeout", "slow_reader", "draining", "starting",
    "request_fault", "quarantined", "engine_failed", "internal",
)  # fmt: skip


class Metrics:
    """All of a server's metrics, with the label model_name."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # a _created series beside each other one would double them
        self.registry = CollectorRegistry()
        self._counted: dict[int, EngineStats] = {}  # by engine
        self._shown: dict[str, int] = {}  # by gauge

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=self.registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        def counted(name: str, text: str, bounds: tuple[float, ...]) -> CountedHistogram:
            made = CountedHistogram(name, text, bounds, model_name)
            self.registry.register(made)
            return made

        # By field of EngineStats.
        self._gauges = {
            "running": gauge("quire_num_requests_running", "Requests that have a batch row."),
            "waiting": gauge("quire_num_requests_waiting", "Requests in the queue."),
            "waiting_tokens": gauge("quire_num_tokens_waiting", "Prompt tokens in the queue."),
            "pages_used": gauge("quire_kv_pages_used", "KV pages held by sequences and steps in flight."),
            "pages_peak": gauge("quire_kv_pages_used_peak", "Most KV pages held at once since the engine started."),
            "pages_total": gauge("quire_kv_pages_total", "KV pages in the pool."),
            "page_bytes": gauge("quire_kv_page_bytes", "Bytes of one KV page."),
            "pages_cached": gauge(
                "quire_kv_pages_cached", "KV pages that nobody holds, kept for prompts that start alike."
            ),
            "pages_shared": gauge("quire_kv_pages_shared", "KV pages that several sequences hold."),
            "pages_if_copied": gauge(
                "quire_kv_pages_if_copied",
                "KV pages that sequences would hold if each had copies of those that it shares.",
            ),
            "slots_unused": gauge(
                "quire_kv_slots_unused", "Places for tokens in running sequences' pages that hold none yet."
            ),
            "host_slots": gauge("quire_kv_host_pages_total", "KV pages that fit in the host tier."),
            "host_slots_used": gauge("quire_kv_host_pages_used", "KV pages that have a copy in the host tier."),
        }
        self._usage = gauge("quire_kv_cache_usage_ratio", "Part of the KV pages that is held, 0 to 1.")
        evicted = Counter(
            "quire_kv_pages_evicted", "Cached KV pages given up, by cause.", ["model_name", "cause"],
            registry=self.registry,
        )  # fmt: skip
        self._counters = {
            "prefix_queries": counter("quire_prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            "prefix_hits": counter("quire_prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            **{f"evicted_{cause.value}": evicted.labels(model_name, cause.value) for cause in Cause},
            "swapped_out": counter("quire_kv_pages_swapped_out", "KV pages copied to the host tier."),
            "swapped_in": counter("quire_kv_pages_swapped_in", "KV pages copied back from the host tier."),
            "swap_lost": counter(
                "quire_kv_pages_swap_lost",
                "Those of them that were not what had been put there, and were computed anew.",
            ),
            "pages_brought": counter(
                "quire_kv_pages_brought", "KV pages copied in from another engine, whose streams came here."
            ),
            "imbalances": counter("quire_kv_ledger_imbalances", "KV pages whose books were wrong; they are set aside."),
            "steps": counter("quire_engine_steps", "Steps that the engine has finished."),
            "computed_tokens": counter(
                "quire_computed_tokens", "Tokens whose KV was computed, recomputed ones included."
            ),
            "recomputed_tokens": counter("quire_recomputed_tokens", "Tokens whose KV a preemption threw away."),
            "preemptions": counter("quire_num_preemptions", "Sequences that lost their pages to an older one."),
            "images_encoded": counter("quire_images_encoded", "Calls of the image encoder; one for each content."),
        }
        self._lifetimes = counted(
            "quire_kv_page_lifetime_seconds", "From a page's publication until its place was needed.", LIFETIMES
        )
        self._replicas = gauge("quire_replicas", "Engines that requests can go to.")
        self._engines = counter("quire_engine_starts", "Engines that became ready: the first one, and its successors.")
        self._prompt_tokens = counter("quire_prompt_tokens", "Prompt tokens of requests that left the queue.")
        self._cached_tokens = counter("quire_prompt_tokens_cached", "Those of them that the prefix cache had.")
        self._generation_tokens = counter("quire_generation_tokens", "Output tokens delivered to request streams.")
        self._step_time = histogram("quire_step_duration_seconds", "Time from a step's plan to its result.", STEP)
        self._overhead = histogram(
            "quire_step_overhead_seconds", "Of a step: planning it, packing it, taking in what came of it.", OVERHEAD
        )
        self._ttft = histogram("quire_time_to_first_token_seconds", "From arrival to the first token.", TTFT)
        self._itl = counted("quire_inter_token_latency_seconds", "Between two tokens of a sequence.", ITL)
        self._queue_time = histogram("quire_request_queue_time_seconds", "From arrival to a batch row.", QUEUE)
        self.request_time = histogram("quire_e2e_request_latency_seconds", "From arrival to the end.", PHASES)
        self._prompt_lengths = histogram("quire_request_prompt_tokens", "Prompt length.", TOKENS)
        self.output_tokens = histogram("quire_request_generation_tokens", "Output length.", TOKENS)
        outcomes = Counter(
            "quire_requests", "Requests by how they ended.", ["model_name", "outcome"], registry=self.registry
        )
        self._outcomes = {name: outcomes.labels(model_name, name) for name in OUTCOMES}

    def request_started(self, prompt_tokens: int, cached: int, waited: float) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached)
        self._prompt_lengths.observe(prompt_tokens)
        self._queue_time.observe(waited)

    def tokens(self, count: int, firsts: Sequence[float], gaps: Mapping[float, int]) -> None:
        """So many came. firsts: seconds from a request to its first one. gaps: how many of the others came so many
        seconds after the one before.
        """
        self._generation_tokens.inc(count)
        for seconds in firsts:
            self._ttft.observe(seconds)
        for seconds, times in gaps.items():
            self._itl.observe(seconds, times)

    def request_ended(self, outcome: str) -> None:
        self._outcomes.get(outcome, self._outcomes["internal"]).inc()

    def engine_attached(self, pages: int, engine: int = 0) -> None:
        """An engine, the first of this number or a new one, counts from 0."""
        self._engines.inc()
        self.engine_stats(EngineStats(pages_total=pages), engine)

    def engine_gone(self, engine: int) -> None:
        """It is nothing any more; what it did is counted."""
        self._counted.pop(engine, None)
        self._set_gauges()

    def engine_step(self, outputs: StepOutputs, engine: int = 0) -> None:
        for seconds in outputs.step_seconds:
            self._step_time.observe(seconds)
        for seconds in outputs.overheads:
            self._overhead.observe(seconds)
        self.engine_stats(outputs.stats, engine)

    def engine_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Gauges as given, of all engines together; counters by what was added since the last call."""
        before = self._counted.get(engine, EngineStats())
        self._counted[engine] = stats
        self._set_gauges()
        for name, counter in self._counters.items():
            if (more := getattr(stats, name) - getattr(before, name)) > 0:
                counter.inc(more)
        if stats.lifetimes != before.lifetimes and stats.lifetimes:  # else of an engine that has just come
            old = before.lifetimes or (0,) * len(stats.lifetimes)
            more_lived = [max(0, n - m) for n, m in zip(stats.lifetimes, old, strict=True)]
            self._lifetimes.add(more_lived, max(0.0, stats.lifetime_seconds - before.lifetime_seconds))

    def _set_gauges(self) -> None:
        engines = list(self._counted.values())
        for name, gauge in self._gauges.items():
            of_each = [getattr(engine, name) for engine in engines]
            now = max(of_each, default=0) if name == "page_bytes" else sum(of_each)
            if self._shown.get(name) != now:
                self._shown[name] = now
                gauge.set(now)
        used, total = self._shown["pages_used"], self._shown["pages_total"]
        self._usage.set(used / total if total else 0.0)
        self._replicas.set(len(engines))
