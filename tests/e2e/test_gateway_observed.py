"""The gateway's metrics, log lines, and spans between its clients' and its servers'."""

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.test_tracing import PARENT, TRACE, Collector, collector, values
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.server import running_server

__all__ = ["collector"]  # the fixture

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "Wherefore art thou a prompt that nobody logs"
ASKED = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
WAIT = 30.0


def scraped(text: str) -> dict[str, float]:
    """By name and labels' values."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{s.name}{{{','.join(s.labels.values())}}}" if s.labels else s.name: s.value for s in samples}


def metrics(gateway: RunningGateway) -> dict[str, float]:
    status, headers, text = gateway.ask("GET", "/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert PROMPT not in text
    return {name.removeprefix("quire_gateway_"): value for name, value in scraped(text).items()}


def wait_for(gateway: RunningGateway, name: str, value: float) -> None:
    deadline = time.monotonic() + WAIT
    while (found := metrics(gateway)).get(name) != value:
        assert time.monotonic() < deadline, found


@pytest.fixture
def seen(collector: tuple[Collector, str], tmp_path: Path) -> tuple[dict[str, float], list[dict], list[Span]]:
    """Metrics, log lines and spans of some requests through a gateway."""
    servicer, endpoint = collector
    log, traces = tmp_path / "log", ("--otlp-traces-endpoint", endpoint)
    with running_server(*traces) as server:
        flags = ("--log-requests", "--log-format", "json", *traces)
        with log.open("w") as file, running_gateway([server.address], *flags, stderr=file) as gateway:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x_request_id": "whole"}
            assert gateway.answer(PATH, ASKED | {"n": 2}, **headers)[0] == 200
            with gateway.send(PATH, ASKED | {"stream": True}, connection="close", x_request_id="stream") as opened:
                assert opened.makefile("rb").read().endswith(b"0\r\n\r\n")
            assert gateway.answer(PATH, ASKED | {"top_p": 7}, x_request_id="refused")[0] == 400
            chat = {"messages": [{"role": "user", "content": PROMPT}]}
            assert gateway.answer(CHATS, chat | {"tools": [1]}, x_request_id="tools")[0] == 400
            for path, status in (("/health", 200), ("/v1/models", 200), ("/v1/nothing", 404), ("/v1/models/x", 404)):
                assert gateway.ask("GET", path)[0] == status
            with gateway.send(PATH, ASKED | {"stream": True, "max_tokens": 900}, x_request_id="left") as opened:
                assert opened.recv(4096)
            wait_for(gateway, "broken_streams_total", 1)
            found = metrics(gateway)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert PROMPT not in log.read_text()
    assert PROMPT.encode() not in servicer.raw
    return found, lines, servicer.spans


def test_requests_are_counted_logged_and_traced(
    seen: tuple[dict[str, float], list[dict], list[Span]],
) -> None:
    found, lines, spans = seen
    ended = {name: value for name, value in found.items() if name.startswith("requests_total")}
    counted = {name: value for name, value in ended.items() if "/metrics" not in name}
    assert counted == {
        f"requests_total{{{PATH},200}}": 3, f"requests_total{{{PATH},400}}": 1, f"requests_total{{{CHATS},400}}": 1,
        "requests_total{/health,200}": 1, "requests_total{/v1/models,200}": 1, "requests_total{other,404}": 1,
        "requests_total{/v1/models/{name},404}": 1,
    }  # fmt: skip
    assert found[f"request_seconds_count{{{PATH}}}"] == 4
    assert found[f"time_to_first_token_seconds_count{{{PATH}}}"] == 3
    assert found["generation_tokens_total"] > 15
    assert found["prompt_tokens_total"] % 3 == 0
    assert found["upstream_errors_total{invalid_argument}"] == 1
    assert (found["requests_running"], found["open_connections"]) == (1, 1), "the scrape itself"
    assert found["process_open_fds"] > 0

    told = [line for line in lines if line["logger"] == "quire.requests"]
    ends = [(line["request_id"], line["status"], line["error"], line["completion_tokens"]) for line in told]
    assert ends[:4] == [
        ("whole", 200, None, 10), ("stream", 200, None, 5), ("refused", 400, "invalid_field", 0),
        ("tools", 400, "invalid_value", 0),
    ]  # fmt: skip
    assert [(line["endpoint"], line["status"]) for line in told[4:7]] == [
        ("/v1/models", 200), ("other", 404), ("/v1/models/{name}", 404),
    ]  # fmt: skip
    assert ends[7][:3] == ("left", 200, "client_left")
    assert {line["process"] for line in lines} == {"gateway"}
    whole = told[0]
    assert 0 < whole["first_token_seconds"] <= whole["seconds"]
    assert (whole["model"], whole["traceparent"]) == ("quire-demo", f"00-{TRACE}-{PARENT}-01")
    start = r"request whole: POST /v1/completions, 200, \d+ prompt \+ 10 generated tokens, the first after "
    assert re.match(start, whole["message"])

    own = {values(span)["quire.request_id"]: span for span in spans if "quire.request_id" in values(span)}
    assert own.keys() == {"whole", "stream", "refused", "tools", "left"}
    assert (own["whole"].trace_id.hex(), own["whole"].parent_span_id.hex()) == (TRACE, PARENT)
    assert own["stream"].parent_span_id == b""
    behind = {str(values(span).get("gen_ai.response.id")).partition(".")[0]: span for span in spans}
    for name in ("whole", "stream", "refused", "left"):
        assert (behind[name].trace_id, behind[name].parent_span_id) == (own[name].trace_id, own[name].span_id)
    assert values(own["whole"])["gen_ai.usage.output_tokens"] == 10
    assert [own[name].status.code for name in ("whole", "left")] == [
        Status.STATUS_CODE_UNSET,
        Status.STATUS_CODE_ERROR,
    ]


def test_metrics_on_a_port_of_their_own() -> None:
    with running_gateway(["127.0.0.1:1"], "--metrics-port", "0") as gateway:
        assert gateway.ask("GET", "/metrics")[0] == 404
        assert gateway.health()[0] == 503
        with urllib.request.urlopen(gateway.metrics_url, timeout=10) as page:  # noqa: S310 - our own port
            found = scraped(page.read().decode())
    assert found["quire_gateway_requests_total{/metrics,404}"] == 1
    assert found["quire_gateway_upstream_errors_total{unavailable}"] == 1
