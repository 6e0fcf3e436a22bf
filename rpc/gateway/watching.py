"""Observes a gateway's requests: always metrics, and a log line and a span if the settings want them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rpc.gateway.exchange import HttpExchange
from rpc.gateway.metrics import GatewayMetrics
from rpc.gateway.spans import GatewaySpans
from rpc.gateway.stats import RequestStats, endpoint_of
from rpc.observe.tracing import HEADERS

PROBES = ("/health", "/metrics")  # not logged if they succeed: they come every few seconds

log = logging.getLogger("quire.requests")


class RequestObserver:
    """Follows each request from its headers to its end."""

    def __init__(self, metrics: GatewayMetrics, log_requests: bool = False, spans: GatewaySpans | None = None) -> None:
        self.metrics = metrics
        self._log_requests, self._spans = log_requests, spans

    @contextmanager
    def watched(self, exchange: HttpExchange) -> Iterator[None]:
        """Counts, logs and traces one request while the context is open.

        With spans, the request's headers name its own span, so that the servers' spans become its children.
        """
        trace = {name: value for name in HEADERS if (value := exchange.headers.get(name))}
        stats = RequestStats(exchange.method, endpoint_of(exchange.path), trace, self.metrics.tokens)
        exchange.stats = stats
        made = None if self._spans is None else self._spans.begin(stats)
        if made is not None:
            exchange.headers.update(made[1])
        self.metrics.began()
        try:
            yield
        finally:
            stats.end()
            self.metrics.ended(stats)
            if self._log_requests and not (stats.endpoint in PROBES and stats.status == 200):
                log_request(exchange.request_id, stats)
            if made is not None and self._spans is not None:
                self._spans.end(made[0], stats, exchange.request_id)


def log_request(request_id: str, stats: RequestStats) -> None:
    """Logs one request: a sentence, with its figures as fields of a JSON log."""
    first, failed = stats.first_token, "" if stats.error is None else f" ({stats.error})"
    log.info(
        "request %s: %s %s, %d%s, %d prompt + %d generated tokens, %s, %.3f s in all",
        request_id,
        stats.method,
        stats.endpoint,
        stats.status,
        failed,
        stats.prompt_tokens,
        stats.completion_tokens,
        "no first token" if first is None else f"the first after {first:.3f} s",
        stats.seconds,
        extra={
            "request_id": request_id,
            "method": stats.method,
            "endpoint": stats.endpoint,
            "status": stats.status,
            "error": stats.error,
            "model": stats.model,
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.completion_tokens,
            "first_token_seconds": first,
            "seconds": stats.seconds,
            "traceparent": stats.trace.get("traceparent"),
        },
    )
