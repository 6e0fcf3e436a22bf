"""Metrics under vLLM's names, for dashboards and routers that know these: Gateway API's endpoint picker, say.

Values are read from Quire's metrics at each scrape, so nothing is counted twice. The label engine is "0", since a
server's engines are one here. Only metrics that mean the same are there; names are those of vLLM 0.32.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rpc.observe.metrics import Metrics

SAME = {
    "quire_prompt_tokens": "prompt_tokens",
    "quire_prompt_tokens_cached": "prompt_tokens_cached",
    "quire_generation_tokens": "generation_tokens",
    "quire_time_to_first_token_seconds": "time_to_first_token_seconds",
    "quire_inter_token_latency_seconds": "inter_token_latency_seconds",
    "quire_request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "quire_e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "quire_request_queue_time_seconds": "request_queue_time_seconds",
    "quire_request_prefill_time_seconds": "request_prefill_time_seconds",
    "quire_request_decode_time_seconds": "request_decode_time_seconds",
    "quire_request_prompt_tokens": "request_prompt_tokens",
    "quire_request_generation_tokens": "request_generation_tokens",
}
SAME_OF_ENGINES = {
    "quire_num_requests_running": "num_requests_running",
    "quire_kv_cache_usage_ratio": "kv_cache_usage_perc",
    "quire_prefix_cache_queries": "prefix_cache_queries",
    "quire_prefix_cache_hits": "prefix_cache_hits",
    "quire_num_preemptions": "num_preemptions",
}
FINISHED = {
    "stop": "stop",
    "length": "length",
    "closed": "stop",
    "aborted": "abort",
    "cancelled": "abort",
    "deadline": "abort",
    "queue_timeout": "abort",
    "slow_reader": "abort",
    "request_fault": "error",
    "quarantined": "error",
    "engine_failed": "error",
    "internal": "error",
}
"""vLLM's reason by outcome. The other outcomes are of requests that were not taken, which vLLM does not count."""
REASONS = ("stop", "length", "abort", "error", "repetition")
LABELS = ["model_name", "engine"]


class Aliases(Collector):
    """Collects metrics under vLLM's names.

    Args:
        of_requests: Families of requests, by name.
        of_engines: Families of engines, by name; None where another server has them.
    """

    def __init__(self, of_requests: Mapping[str, Collector], of_engines: Mapping[str, Collector] | None) -> None:
        self._requests, self._engines = of_requests, of_engines
        self._computed = 0.0

    def collect(self) -> Iterator[Metric]:
        yield from _renamed(self._requests, SAME)
        yield self._prompt_sources()
        yield self._finished()
        if self._engines is not None:
            yield from _renamed(self._engines, SAME_OF_ENGINES)
            yield self._waiting(self._engines)
            yield self._cache_config(self._engines)

    def _prompt_sources(self) -> Metric:
        made = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV comes from.", labels=[*LABELS, "source"]
        )
        (model, every), (_, cached) = (
            _value(self._requests, name) for name in ("quire_prompt_tokens", "quire_prompt_tokens_cached")
        )
        # Both grow while they are read, the second one later. Their difference must not shrink: a counter that shrinks
        # is taken for a restart.
        self._computed = max(self._computed, every - cached)
        for source, count in (
            ("local_compute", self._computed),
            ("local_cache_hit", cached),
            ("external_kv_transfer", 0),
        ):
            made.add_metric([model, "0", source], count)
        return made

    def _finished(self) -> Metric:
        made = CounterMetricFamily("vllm:request_success", "Requests by outcome.", labels=[*LABELS, "finished_reason"])
        counts, model = dict.fromkeys(REASONS, 0.0), ""
        for metric in self._requests["quire_requests"].collect():
            for sample in metric.samples:
                model = sample.labels["model_name"]
                if (reason := FINISHED.get(sample.labels["outcome"])) is not None:
                    counts[reason] += sample.value
        for reason, count in counts.items():
            made.add_metric([model, "0", reason], count)
        return made

    def _waiting(self, engines: Mapping[str, Collector]) -> Metric:
        """Counts requests that wait in engines' queues, and those that wait for an engine."""
        model, queued = _value(engines, "quire_num_requests_waiting")
        _, parked = _value(self._requests, "quire_num_requests_parked")
        made = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait to be scheduled.", labels=LABELS)
        made.add_metric([model, "0"], queued + parked)
        return made

    def _cache_config(self, engines: Mapping[str, Collector]) -> Metric:
        """Returns the size of the pool, as Gateway API reads it."""
        model, size = _value(engines, "quire_kv_page_tokens")
        _, pages = _value(engines, "quire_kv_pages")
        made = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache.", labels=[*LABELS, "block_size", "num_gpu_blocks"]
        )
        made.add_metric([model, "0", f"{size:.0f}", f"{pages:.0f}"], 1)
        return made


def register_aliases(metrics: Metrics, with_engines: bool) -> None:
    """Adds vLLM's names to the registry of these metrics.

    Args:
        metrics: Metrics of a server.
        with_engines: The server has engines of its own, whose metrics are added too.
    """
    metrics.registry.register(Aliases(metrics.make.made, metrics.engines.make.made if with_engines else None))


def _renamed(made: Mapping[str, Collector], names: Mapping[str, str]) -> Iterator[Metric]:
    for ours, theirs in names.items():
        for metric in made[ours].collect():
            alias = Metric(f"vllm:{theirs}", metric.documentation, metric.type)
            for sample in metric.samples:
                name = alias.name + sample.name.removeprefix(metric.name)
                alias.add_sample(name, {**sample.labels, "engine": "0"}, sample.value)
            yield alias


def _value(made: Mapping[str, Collector], name: str) -> tuple[str, float]:
    """Returns the model_name and the value of a family with one sample."""
    ((sample,),) = (metric.samples for metric in made[name].collect())
    return sample.labels["model_name"], sample.value
