"""Sends the current OpenTelemetry span with a call, so that the server's spans join its trace."""

import sys

from rpc.client.security import Metadata


def trace_metadata() -> Metadata:
    """Returns W3C traceparent and tracestate of the current span; an empty tuple without a span."""
    # A program that never imported OpenTelemetry has no span, and must not pay for the import.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = dict[str, str]()
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
