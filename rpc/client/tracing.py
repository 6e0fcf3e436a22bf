"""Traces go on at the server: a call names the span that it is made in, where the program uses OpenTelemetry."""

import sys

from rpc.client.security import Metadata


def trace_metadata() -> Metadata:
    """W3C traceparent and tracestate of the current span; nothing where there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = dict[str, str]()
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
