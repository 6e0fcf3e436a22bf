"""vLLM's names for the same values."""

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from rpc.observe.aliases import FINISHED, REASONS, register_aliases
from rpc.observe.metrics import OUTCOMES, Metrics
from rpc.observe.metrics_http import metrics_app
from rpc.settings import ListenSettings
from scheduler.events import EngineStats

# What Prometheus 2.42 and 3.5 send with their scrapes.
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"  # noqa: E501
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"  # noqa: E501


def filled(shows_engines: bool = True) -> Metrics:
    """Returns the metrics of a server that has two engines and did a little of everything."""
    metrics = Metrics("demo", shows_engines)
    metrics.watch(lambda: 2, lambda: 0, lambda: 0, lambda: 4, lambda: 2)
    metrics.engine_attached(60, 0, 32)
    metrics.engine_attached(40, 1, 32)
    stats = EngineStats(running=3, waiting=1, pages_used=5, pages_total=60, preemptions=2, prefix_queries=70)
    metrics.engines.stats(stats, 0)
    metrics.request_started(30, 16, 0.1)
    metrics.tokens(4, [0.02], {0.004: 3}, [0.01])
    metrics.decoded(0.012, 0.004)
    metrics.request_time.observe(0.5)
    metrics.output_tokens.observe(4)
    for outcome in OUTCOMES:
        metrics.request_ended(outcome, "ann")
    metrics.tenants.tokens("ann", prompt=30, cached=16, generated=4)
    return metrics


def page(metrics: Metrics, accept: str = "") -> dict[str, float]:
    """Samples as they are read, by name and labels but model_name and engine. accept: "" for a scrape without it."""
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": ""}
    headers: dict[str, str] = {}
    asked = environ | ({"HTTP_ACCEPT": accept} if accept else {})
    text = b"".join(metrics_app(metrics.registry)(asked, lambda status, given: headers.update(given)))
    kind = "application/openmetrics-text; version=1.0.0" if "openmetrics" in accept else "text/plain; version=0.0.4"
    assert headers["Content-Type"].startswith(kind)
    parse = openmetrics.text_string_to_metric_families if "openmetrics" in accept else text_string_to_metric_families
    families = list(parse(text.decode()))
    samples = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("vllm"):
            assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == ("demo", "0")
        labels = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k != "model_name")
        key = sample.name + (f"{{{labels}}}" if labels else "")
        assert key not in samples
        samples[key] = sample.value
    return samples


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, "", "text/plain"])
def test_names_keep_their_colon_whoever_reads_them(accept: str) -> None:
    metrics = filled()
    register_aliases(metrics, with_engines=True)
    samples = page(metrics, accept)
    assert samples["vllm:num_requests_running"] == samples["quire_num_requests_running"] == 3
    assert not any(name.startswith("vllm_") for name in samples)
    plain = page(metrics)
    assert [name for name in samples | plain if samples.get(name) != plain.get(name) and "process_" not in name] == []


def test_values_are_those_of_the_metrics() -> None:
    metrics = filled()
    register_aliases(metrics, with_engines=True)
    samples = page(metrics)
    assert samples["vllm:num_requests_waiting"] == 1 + 2, "in the queue, and for an engine"
    assert samples["vllm:kv_cache_usage_perc"] == 0.05
    assert samples["vllm:cache_config_info{block_size=32,num_gpu_blocks=100}"] == 1
    assert samples["vllm:prefix_cache_queries_total"] == 70
    assert samples["vllm:num_preemptions_total"] == 2
    assert samples["vllm:generation_tokens_total"] == 4
    sources = [f"vllm:prompt_tokens_by_source_total{{source={s}}}" for s in ("local_compute", "local_cache_hit")]
    assert [samples[source] for source in sources] == [14, 16]
    assert samples["vllm:prompt_tokens_total"] == 30
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert samples[f"vllm:{name}_count"] == samples[f"quire_{name}_count"] > 0
        assert samples[f"vllm:{name}_sum"] == samples[f"quire_{name}_sum"]
        assert samples[f"vllm:{name}_bucket{{le=+Inf}}"] == samples[f"vllm:{name}_count"]


def test_prompt_tokens_that_were_computed_never_shrink() -> None:
    """The page is read while requests start: the cached ones may be newer than the others. A counter that shrinks is a
    restart to Prometheus.
    """
    metrics = filled()
    register_aliases(metrics, with_engines=True)
    computed = "vllm:prompt_tokens_by_source_total{source=local_compute}"
    assert page(metrics)[computed] == 14
    metrics.cached_tokens.inc(10)
    assert page(metrics)[computed] == 14
    metrics.prompt_tokens.inc(12)
    assert page(metrics)[computed] == 16


def test_requests_that_were_taken_are_counted_by_vllms_reasons() -> None:
    assert set(FINISHED) <= set(OUTCOMES)
    metrics = filled()
    register_aliases(metrics, with_engines=True)
    samples = page(metrics)
    found = {reason: samples[f"vllm:request_success_total{{finished_reason={reason}}}"] for reason in REASONS}
    assert found == {"stop": 2, "length": 1, "abort": 5, "error": 4, "repetition": 0}


def test_engines_that_show_themselves_are_under_these_names_all_the_same() -> None:
    """Once: what routes requests reads the server alone."""
    metrics = filled(shows_engines=False)
    register_aliases(metrics, with_engines=True)
    samples = page(metrics)
    assert samples["vllm:num_requests_running"] == 3
    assert "quire_num_requests_running" not in samples


def test_who_joined_a_server_does_not_count_its_engines_again() -> None:
    metrics = filled(shows_engines=False)
    register_aliases(metrics, with_engines=False)
    samples = page(metrics)
    assert "vllm:num_requests_running" not in samples
    assert samples["vllm:generation_tokens_total"] == 4


def test_without_the_flag_there_are_none() -> None:
    samples = page(filled())
    assert not any(name.startswith("vllm") for name in samples)
    with pytest.raises(ValueError, match="--metrics-aliases is 'sglang', must be one of none, vllm"):
        ListenSettings(metrics_aliases="sglang")
