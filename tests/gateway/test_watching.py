"""Counts of requests over HTTP."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from quire.v1 import generation_service_pb2 as pb

from rpc.gateway.exchange import HttpExchange, failures_to
from rpc.gateway.metrics import GatewayMetrics
from rpc.gateway.settings import GatewaySettings
from rpc.gateway.stats import RequestStats, endpoint_of
from rpc.gateway.watching import RequestObserver


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/v1/completions", "/v1/completions"), ("/v1/models/a/b", "/v1/models/{name}"), ("/v1/models", "/v1/models"),
        ("/v1/completions/", "other"), ("/" + "x" * 9999, "other"), ("", "other"),
    ],
)  # fmt: skip
def test_clients_make_no_new_series(path: str, endpoint: str) -> None:
    assert endpoint_of(path) == endpoint


def test_a_prompt_that_a_second_server_takes_over_counts_once() -> None:
    came: list[int] = []
    stats = RequestStats("POST", "/v1/completions", {}, came.append)
    for position, count in ((0, 1), (1, 0), (0, 3), (0, 0)):
        message = pb.StreamGenerateResponse(deltas=[pb.SequenceDelta(token_count=count), pb.SequenceDelta()])
        message.prompt_info.token_count = 7 + position
        stats.count_message(position, message)
        if position == 0 and count == 1:
            first = stats.first_token
    assert (stats.prompt_tokens, stats.completion_tokens, came) == (15, 4, [1, 3])
    assert stats.first_token == first is not None


def counted(metrics: GatewayMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.page().decode())
    return {
        sample.name.removeprefix("quire_gateway_")
        + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


async def test_requests_that_end_in_any_way_are_no_longer_running() -> None:
    async def nowhere(_: Any) -> None:
        pass

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    metrics = GatewayMetrics()
    watching = RequestObserver(metrics)
    for raised in (None, ValueError, "begun"):
        scope = {"method": "POST", "path": "/v1/completions", "headers": [], "state": {"cut": lambda: None}}
        exchange = HttpExchange(scope, gone, nowhere)
        with watching.watched(exchange):
            assert counted(metrics)["requests_running"] == 1
            async with failures_to(exchange):
                if raised == "begun":
                    await exchange.begin_events()
                if raised:
                    raise ValueError
    found = counted(metrics)
    assert found["requests_running"] == 0
    by_status = [found[f"requests_total /v1/completions {status}"] for status in (499, 500, 200)]
    assert (by_status, found["broken_streams_total"]) == ([1, 1, 1], 1)


def test_of_headers_that_come_twice_the_first_counts() -> None:
    """As it does for a proxy that checks `Authorization` in front of the gateway."""
    headers = [(b"authorization", b"a"), (b"authorization", b"b"), (b"host", b"c")]
    exchange = HttpExchange({"headers": headers}, None, None)  # type: ignore[arg-type]
    assert exchange.metadata() == (("authorization", "a"),)


def test_an_id_in_the_headers_is_stronger_than_one_in_the_body() -> None:
    for headers, expected in (([(b"x-request-id", b"head")], "head"), ([], "body")):
        exchange = HttpExchange({"headers": headers}, None, None)  # type: ignore[arg-type]
        exchange.adopt("body")
        assert exchange.request_id == expected


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({}, True), ({"host": "::1"}, True), ({"metrics_port": 0}, False), ({"host": "10.0.0.4"}, False),
        ({"host": "0.0.0.0", "metrics_port": 9466}, False),  # noqa: S104
    ],
)  # fmt: skip
def test_metrics_are_beside_the_api_on_loopback_alone(flags: dict[str, Any], shown: bool) -> None:
    assert GatewaySettings(allow_insecure_bind=True, **flags).shows_metrics is shown
