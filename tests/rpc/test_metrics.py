"""The metrics page as Prometheus reads it."""

import ast
import itertools
import re
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cache_manager.cached import LIFETIMES
from rpc.frontend.errors import failed_end
from rpc.frontend.stream import FinishReason
from rpc.observe.metrics import ITL, OUTCOMES, PHASES, TTFT, WHOLE, Metrics
from rpc.observe.metrics_http import serve_metrics
from scheduler.events import End, EndReason, EngineStats
from scheduler.preemption_cause import PreemptionCause


def test_page_parses_and_follows_the_naming_rules() -> None:
    metrics = Metrics("demo")
    metrics.engines.stats(EngineStats(running=3, waiting=2, pages_used=5, pages_total=10, steps=7, preemptions=1))
    metrics.tokens(4, [0.02], {0.004: 2, 0.5: 1})
    server = serve_metrics(0, metrics.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    finally:
        server.shutdown()
        server.server_close()
    assert families["process_resident_memory_bytes"].samples[0].value > 2**20
    assert families["quire_build_info"].samples[0].labels["version"]
    for name, family in families.items():
        if name.startswith("process_"):  # named as everywhere
            continue
        assert name.startswith("quire_")
        assert not name.endswith("_total") or family.type == "gauge"
        assert family.documentation.endswith(".")
        assert all(sample.labels["model_name"] == "demo" for sample in family.samples)
        assert not any(sample.name.endswith("_created") for sample in family.samples)
    value = {s.name: s.value for f in families.values() for s in f.samples if s.labels.keys() == {"model_name"}}
    assert value["quire_num_requests_running"] == 3
    assert value["quire_num_requests_waiting"] == 2
    assert value["quire_kv_cache_usage_ratio"] == 0.5
    assert value["quire_engine_steps_total"] == 7
    assert value["quire_num_preemptions_total"] == 1
    assert value["quire_time_to_first_token_seconds_count"] == 1
    assert value["quire_generation_tokens_total"] == 4
    assert value["quire_inter_token_latency_seconds_count"] == 3
    assert value["quire_inter_token_latency_seconds_sum"] == 0.508


def test_preemptions_are_counted_by_cause_and_in_all() -> None:
    metrics = Metrics("demo")
    metrics.engines.stats(EngineStats(preemptions=2, preemptions_pages=1, preemptions_priority=1))
    metrics.engines.stats(EngineStats(preemptions=5, preemptions_pages=2, preemptions_priority=1, preemptions_search=2))
    name = "quire_num_preemptions_by_cause_total"
    labels = [{"model_name": "demo", "cause": cause} for cause in PreemptionCause]
    found = {one["cause"]: metrics.registry.get_sample_value(name, one) for one in labels}
    assert found == {"pages": 2, "priority": 1, "search": 2, "lost_copy": 0}
    assert metrics.registry.get_sample_value("quire_num_preemptions_total", {"model_name": "demo"}) == 5


def test_counters_add_what_is_new_and_survive_an_engine_that_starts_again() -> None:
    metrics = Metrics("demo")
    for steps in (5, 5, 9):
        metrics.engines.stats(EngineStats(steps=steps))
    metrics.engine_attached(9)
    for steps in (2, 4):
        metrics.engines.stats(EngineStats(steps=steps))
    assert metrics.registry.get_sample_value("quire_engine_steps_total", {"model_name": "demo"}) == 13
    metrics.engine_gone(0)
    assert metrics.registry.get_sample_value("quire_engine_steps_total", {"model_name": "demo"}) == 13


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"quire_{name}", {"model_name": "demo", **labels})


CLASSES = len(LIFETIMES) + 1


def cached(scale: int) -> EngineStats:
    """Makes the stats of an engine that has used its prefix cache for some time."""
    return EngineStats(
        pages_total=9,
        prefix_queries=100 * scale,
        prefix_hits=60 * scale,
        evicted_capacity=2 * scale,
        evicted_reset=3 * scale,
        evicted_fault=4 * scale,
        lifetimes=tuple(scale * i for i in range(CLASSES)),
        lifetime_seconds=7.5 * scale,
        swapped_out=8 * scale,
        swapped_in=6 * scale,
        swap_lost=5 * scale,
        imbalances=scale,
        pages_transferred=9 * scale,
    )


COUNTED = {
    "prefix_cache_queries_total": 100,
    "prefix_cache_hits_total": 60,
    "kv_ledger_imbalances_total": 1,
    "kv_pages_swapped_out_total": 8,
    "kv_pages_swapped_in_total": 6,
    "kv_pages_swap_lost_total": 5,
    "kv_pages_transferred_total": 9,
    "kv_page_lifetime_seconds_count": sum(range(CLASSES)),
    "kv_page_lifetime_seconds_sum": 7.5,
}


def check_counted(metrics: Metrics, scale: int) -> None:
    assert {name: value(metrics, name) for name in COUNTED} == {name: n * scale for name, n in COUNTED.items()}
    evicted = [value(metrics, "kv_pages_evicted_total", cause=cause) for cause in ("capacity", "reset", "fault")]
    assert evicted == [2 * scale, 3 * scale, 4 * scale]


def test_what_the_prefix_cache_did_survives_an_engine_that_is_replaced() -> None:
    metrics = Metrics("demo")
    metrics.engine_attached(9)
    metrics.engines.stats(cached(1))
    metrics.engines.stats(cached(3))
    check_counted(metrics, 3)
    metrics.engine_attached(9)
    check_counted(metrics, 3)
    metrics.engines.stats(cached(2))
    check_counted(metrics, 5)


def test_lifetimes_are_a_histogram_as_prometheus_reads_it() -> None:
    metrics = Metrics("demo")
    metrics.engines.stats(cached(1))
    text = generate_latest(metrics.registry).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "quire_kv_page_lifetime_seconds"]
    assert family.type == "histogram"
    buckets = {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
    assert list(buckets) == [*map(float, LIFETIMES), float("inf")]
    assert list(buckets.values()) == list(itertools.accumulate(range(CLASSES)))


@pytest.mark.parametrize(
    ("name", "bounds", "lowest"),
    [
        ("time_to_first_token", TTFT, 0.001),
        ("inter_token_latency", ITL, 0.00025),
        ("request_time_per_output_token", ITL, 0.00025),
        ("request_queue_time", PHASES, 0.001),
        ("request_prefill_time", PHASES, 0.001),
        ("request_decode_time", PHASES, 0.001),
        ("e2e_request_latency", WHOLE, 0.01),
    ],
)
def test_bounds_of_latencies_fit_small_models_and_leave_no_gap(
    name: str, bounds: tuple[float, ...], lowest: float
) -> None:
    text = generate_latest(Metrics("demo").registry).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == f"quire_{name}_seconds"]
    shown = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert shown == [*bounds, float("inf")]
    assert shown[0] <= lowest
    assert all(after <= 2.5 * before for before, after in itertools.pairwise(shown) if after <= 10)
    assert len(shown) <= 32, "each is a series"


def test_gauges_of_the_cache_are_the_engines_last() -> None:
    metrics = Metrics("demo")
    metrics.engines.stats(EngineStats(pages_cached=7, pages_shared=5, slots_unused=11, host_slots_used=1, host_slots=9))
    stats = EngineStats(pages_cached=6, pages_shared=4, slots_unused=10, host_slots_used=3, host_slots=9)
    metrics.engines.stats(replace(stats, pages_if_copied=12))
    names = (
        "kv_pages_cached",
        "kv_pages_shared",
        "kv_pages_if_copied",
        "kv_slots_unused",
        "kv_host_pages_used",
        "kv_host_pages",
    )
    assert [value(metrics, name) for name in names] == [6, 4, 12, 10, 3, 9]


def test_a_value_on_a_bound_is_in_the_bucket_of_that_bound() -> None:
    """Prometheus's `le`. 0.1 s is what is promised of a token."""
    metrics = Metrics("demo")
    metrics.tokens(3, [], {0.1: 2, 0.1001: 1})
    buckets = {
        bound: value(metrics, "inter_token_latency_seconds_bucket", le=bound) for bound in ("0.075", "0.1", "0.15")
    }
    assert buckets == {"0.075": 0, "0.1": 2, "0.15": 3}


def test_gauges_are_of_the_engines_that_there_are() -> None:
    metrics = Metrics("demo")
    for engine in (0, 1):
        metrics.engine_attached(20, engine)
        metrics.engines.stats(EngineStats(running=3, pages_used=5, pages_total=20, page_bytes=4096), engine)
    names = ("num_requests_running", "kv_pages_used", "kv_pages", "kv_page_bytes", "kv_cache_usage_ratio")
    assert [value(metrics, name) for name in names] == [6, 10, 40, 4096, 0.25], "a page of all is of one size"
    metrics.engine_gone(0)
    assert [value(metrics, name) for name in names] == [3, 5, 20, 4096, 0.25]
    metrics.engine_gone(1)
    assert [value(metrics, name) for name in names] == [0, 0, 0, 0, 0]


def test_use_of_the_pool_in_pages_at_most_and_in_bytes() -> None:
    metrics = Metrics("demo")
    metrics.engines.stats(EngineStats(pages_used=7, pages_peak=12, pages_total=20, page_bytes=49152))
    names = ("kv_pages_used", "kv_pages_used_peak", "kv_pages", "kv_page_bytes")
    assert [value(metrics, name) for name in names] == [7, 12, 20, 49152]


def test_cached_prompt_tokens_are_counted_with_the_prompts() -> None:
    metrics = Metrics("demo")
    metrics.request_started(20, 0, 0.1)
    metrics.request_started(30, 16, 0.1)
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "prompt_tokens_cached_total")) == (50, 16)


def test_every_way_a_request_can_end_has_an_outcome() -> None:
    failures = [failed_end(End(1, reason)) for reason in EndReason]
    ways = {f.reason.lower() for f in failures if f is not None} | {reason.value for reason in FinishReason}
    assert ways <= set(OUTCOMES)


ROOT = Path(__file__).parents[2]
NO_OUTCOMES = {"NO_OTHER_REPLICA", "NO_SUCH_REPLICA", "NO_SUCH_REQUEST", "NO_ANSWER", "NOT_ENDED", "NO_OUTPUT"}
"""What AdminService answers with, and what only a bug can cause, which counts as internal."""


def test_every_reason_to_fail_a_request_is_an_outcome_of_its_own() -> None:
    """Else it would count as internal, and operators would be woken for what a client did."""
    services = [ROOT / f"rpc/services/{name}.py" for name in ("convert", "generation", "writer", "errors")]
    reasons = set(re.findall(r'"(CHAT_[A-Z]+)"', (ROOT / "model/inputs/chat_renderer.py").read_text()))
    services += (ROOT / "rpc/services/inference").glob("*.py")
    for path in [*(ROOT / "rpc/frontend").glob("*.py"), *services]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RequestFailed":
                reason = ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else "CHAT_ERROR"
                reasons.add(reason)
    assert len(reasons) > 15
    assert {reason.lower() for reason in reasons - NO_OUTCOMES} <= set(OUTCOMES)
    ends = {reason.value for reason in FinishReason} | {"cancelled"}
    assert set(OUTCOMES) - ends <= {reason.lower() for reason in reasons}, "an outcome that nothing has"
