"""The metrics page as Prometheus reads it."""

import urllib.request

from prometheus_client import start_http_server
from prometheus_client.parser import text_string_to_metric_families

from rpc.frontend.errors import failed_end
from rpc.frontend.stream import FinishReason
from rpc.observe.metrics import OUTCOMES, Metrics
from scheduler.events import End, EndReason, EngineStats


def test_page_parses_and_follows_the_naming_rules() -> None:
    metrics = Metrics("demo")
    metrics.engine_stats(EngineStats(running=3, waiting=2, pages_used=5, pages_total=10, steps=7, preemptions=1))
    metrics.token(0.02, True)
    server, thread = start_http_server(0, "127.0.0.1", registry=metrics.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    for name, family in families.items():
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


def test_counters_add_what_is_new_and_survive_an_engine_that_starts_again() -> None:
    metrics = Metrics("demo")
    for steps in (5, 5, 9, 2, 4):
        metrics.engine_stats(EngineStats(steps=steps))
    assert metrics.registry.get_sample_value("quire_engine_steps_total", {"model_name": "demo"}) == 11


def test_every_way_a_request_can_end_has_an_outcome() -> None:
    failures = [failed_end(End(1, reason)) for reason in EndReason]
    ways = {f.reason.lower() for f in failures if f is not None} | {reason.value for reason in FinishReason}
    assert ways <= set(OUTCOMES)
