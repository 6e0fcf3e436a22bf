"""Traces of requests for an OpenTelemetry collector, with the attributes of the semantic conventions for GenAI.

Each request has a span, made at its end, under the span that its caller names in `traceparent`. Inside it is a span for
each phase that the request came to: queue, prefill, decode.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rpc.distribution import how_to_install
from rpc.observe.records import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

HEADERS = ("traceparent", "tracestate")
NANO = 1_000_000_000
LONGEST = 256  # characters of an attribute, as a client may send a model's name of any length


def trace_of(metadata: Any) -> dict[str, str]:
    """Returns the W3C headers among a call's metadata."""
    return {key: value for key, value in metadata or () if key in HEADERS and isinstance(value, str)}


class Traces:
    """Observer that makes the spans of each ended request. Sends in the background; `close` sends the rest."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quire")

    def __call__(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.status import Status, StatusCode

        began = round(record.arrived * NANO)
        span = self._tracer.start_span(
            f"{record.operation} {record.model}",
            context=_parent(record.trace),
            kind=SpanKind.SERVER,
            attributes=dict(attributes(record)),
            start_time=began,
        )
        if record.failed:
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        inside = set_span_in_context(span)
        for phase in record.phases:
            child = self._tracer.start_span(phase.name, context=inside, start_time=began + round(phase.start * NANO))
            child.end(began + round(phase.end * NANO))
        span.end(began + round(record.seconds * NANO))

    def close(self) -> None:
        """Sends the remaining spans, and waits some seconds for a slow collector."""
        self._provider.shutdown()


def _parent(trace: Mapping[str, str]) -> "Context":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(trace)


def attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a request's span, name and value.

    Names are those of https://opentelemetry.io/docs/specs/semconv/gen-ai/.
    """
    sampling, stopping = record.spec.sampling, record.spec.stopping
    given = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": record.spec.model or record.model,
        "gen_ai.request.max_tokens": stopping.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.sequence_count if sampling.sequence_count > 1 else None,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.server.time_to_first_token": record.first_token,
        "error.type": record.outcome if record.failed else None,
        "quire.tenant": record.spec.tenant,
        "quire.submissions": record.submissions,
    }
    yield from ((name, value) for name, value in given.items() if value is not None and _fits(value))


def _fits(value: object) -> bool:
    """Returns whether OTLP can hold a value: its integers have 64 bits and a sign."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def open_traces(endpoint: str) -> Traces:
    """Opens traces to a collector, as `open_provider`."""
    return Traces(open_provider(endpoint))


def open_provider(endpoint: str, service: str = "quire") -> "TracerProvider":
    """Returns a provider that sends spans to a collector by OTLP over gRPC.

    Args:
        endpoint: http://HOST:PORT or https://HOST:PORT of the collector.
        service: Name of the process in its traces.

    Raises:
        ValueError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which is not there ({error}): {how_to_install('tracing')}"
        ) from None
    limits = SpanLimits(max_attribute_length=LONGEST)
    provider = TracerProvider(resource=Resource.create({"service.name": service}), span_limits=limits)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
