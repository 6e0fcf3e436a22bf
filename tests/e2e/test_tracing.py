"""Traces as a collector gets them: a real server, and a collector in this process."""

from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from quire.v1 import generation_service_pb2 as pb

from tests.support.collector import Collector, running_collector, values
from tests.support.server import running_server, stream_request

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "Wherefore art thou a prompt that nobody traces"


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with running_collector() as running:
        yield running


def test_each_request_is_a_span_under_its_callers(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    parent = ("traceparent", f"00-{TRACE}-{PARENT}-01")
    with running_server("--otlp-traces-endpoint", endpoint) as server, grpc.insecure_channel(server.address) as channel:
        stub = server.stub(channel)
        request = stream_request(PROMPT, 5, temperature=0.5, seed=2**64 - 1)
        request.request_id = "streamed"
        list(stub.StreamGenerate(request, metadata=(parent,), timeout=60))
        unary = pb.GenerateRequest(spec=stream_request(PROMPT, 3).spec, request_id="unary")
        stub.Generate(unary, timeout=60)
        unary.spec.sampling.top_p = 7
        unary.request_id = "refused"
        with pytest.raises(grpc.RpcError):
            stub.Generate(unary, timeout=60)
        entry = pb.GenerateRequest(spec=stream_request(PROMPT, 2).spec, request_id="entry")
        list(stub.BatchGenerate(pb.BatchGenerateRequest(requests=[entry]), metadata=(parent,), timeout=60))
    # The server has ended, and has sent all that there was.
    spans = {
        str(values(span)["gen_ai.response.id"]): span for span in servicer.spans if span.kind == Span.SPAN_KIND_SERVER
    }
    assert spans.keys() == {"streamed", "unary", "refused", "entry"}
    assert values(spans["refused"])["error.type"] == "invalid_field"
    assert "gen_ai.request.temperature" not in values(spans["refused"]), "what could not be read is not known"
    streamed = spans["streamed"]
    assert (streamed.trace_id.hex(), streamed.parent_span_id.hex()) == (TRACE, PARENT)
    assert spans["entry"].parent_span_id.hex() == PARENT
    assert spans["unary"].parent_span_id == b""
    assert streamed.name == f"text_completion {server.model}"
    found = values(streamed)
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert "gen_ai.request.seed" not in found, "it does not fit"
    assert streamed.status.code == Status.STATUS_CODE_UNSET
    phases = {span.name: span for span in servicer.spans if span.parent_span_id == streamed.span_id}
    assert list(phases) == ["queue", "prefill", "decode"]
    assert streamed.start_time_unix_nano == phases["queue"].start_time_unix_nano
    assert phases["queue"].end_time_unix_nano == phases["prefill"].start_time_unix_nano
    assert phases["prefill"].end_time_unix_nano == phases["decode"].start_time_unix_nano
    assert phases["decode"].end_time_unix_nano <= streamed.end_time_unix_nano
    assert PROMPT.encode() not in servicer.raw


def test_a_failure_is_an_error_of_its_span(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    with running_server("--otlp-traces-endpoint", endpoint) as server, grpc.insecure_channel(server.address) as channel:
        stub = server.stub(channel)
        request = stream_request("x", 900)
        request.request_id = "left"
        call = stub.StreamGenerate(request, timeout=60)
        next(call)
        call.cancel()
        server.wait_for_metric("quire_requests_total{cancelled}", 1)
        wrong = pb.GenerateRequest(spec=stream_request([10**6], 3).spec, request_id="wrong")
        with pytest.raises(grpc.RpcError):
            stub.Generate(wrong, timeout=60)
    spans = {values(span).get("gen_ai.response.id"): span for span in servicer.spans}
    assert spans["left"].status.code == Status.STATUS_CODE_UNSET
    assert spans["wrong"].status.code == Status.STATUS_CODE_ERROR
    assert values(spans["wrong"])["error.type"] == "invalid_field"


@pytest.mark.slow
def test_a_collector_that_is_not_there_harms_nobody() -> None:
    with (
        running_server("--otlp-traces-endpoint", "http://127.0.0.1:1") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        answer = server.stub(channel).Generate(pb.GenerateRequest(spec=stream_request("x", 3).spec), timeout=60)
        assert answer.usage.completion_tokens == 3
