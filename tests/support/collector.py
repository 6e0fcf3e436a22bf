"""An OpenTelemetry collector in this process, which takes spans over gRPC."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self._news = threading.Condition()

    def Export(self, request: otlp.ExportTraceServiceRequest, context: object) -> otlp.ExportTraceServiceResponse:  # noqa: N802
        with self._news:
            self.raw += request.SerializeToString()
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self._news.notify_all()
        return otlp.ExportTraceServiceResponse()


@contextmanager
def running_collector() -> Iterator[tuple[Collector, str]]:
    """The collector, and its address as a URL."""
    servicer, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)


def values(span: Span) -> dict[str, object]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found
