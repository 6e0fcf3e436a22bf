"""OpenTelemetry spans of HTTP requests: children of their caller's span, parents of the servers' spans."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rpc.gateway.stats import RequestStats
from rpc.observe.tracing import NANO, open_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TRACED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class GatewaySpans:
    """Makes spans, and sends them in the background; `close` sends the rest."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._headers = provider, TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("quire.gateway")

    def begin(self, stats: RequestStats) -> tuple["Span", Mapping[str, str]] | None:
        """Returns a span, and the headers that make servers' spans its children; None for paths without spans."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        if stats.endpoint not in TRACED:
            return None
        span = self._tracer.start_span(
            f"{stats.method} {stats.endpoint}",
            context=self._headers.extract(stats.trace),
            kind=SpanKind.SERVER,
            start_time=round(stats.arrived * NANO),
        )
        headers: dict[str, str] = {}
        self._headers.inject(headers, set_span_in_context(span))
        return span, headers

    def end(self, span: "Span", stats: RequestStats, request_id: str) -> None:
        """Ends a span, with the request's counters as its attributes."""
        from opentelemetry.trace.status import Status, StatusCode

        given: dict[str, Any] = {
            "http.request.method": stats.method,
            "http.route": stats.endpoint,
            "http.response.status_code": stats.status,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": stats.model or None,
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.completion_tokens,
            "gen_ai.server.time_to_first_token": stats.first_token,
            "error.type": stats.error,
            "quire.request_id": request_id,
        }
        span.set_attributes({name: value for name, value in given.items() if value is not None})
        if stats.status >= 500 or (stats.error is not None and stats.status == 200):
            span.set_status(Status(StatusCode.ERROR, stats.error))
        span.end(round((stats.arrived + stats.seconds) * NANO))

    def close(self) -> None:
        """Sends the rest; waits a few seconds for a slow collector."""
        self._provider.shutdown()


def open_spans(endpoint: str) -> GatewaySpans:
    """Opens a sender of spans to a collector.

    Args:
        endpoint: Address as in `ObserveSettings`.

    Raises:
        ValueError: OpenTelemetry is not installed.
    """
    return GatewaySpans(open_provider(endpoint, "quire-gateway"))
