"""Phases of requests under load: metrics, logs and traces of one server say the same of each."""

import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_grpc
from quire.v1 import generation_service_pb2 as pb

from tests.support.collector import Collector, running_collector, values
from tests.support.processes import wait_until
from tests.support.server import RunningServer, running_server, stream_request

pytestmark = pytest.mark.slow  # one load of crowds, which all its tests read
PHASES = ("queue", "prefill", "decode")
PROMPT = list(range(300, 900))
"""With steps of 64 tokens its prefill takes ten of them."""
ALONE, CROWD = 3, 12
CROWDS = 20  # most crowds that are sent until the drain moves a request


class Run:
    """Reports of one server on its requests: log lines, spans and histograms. sent: count of the requests."""

    def __init__(self, log: Path, collector: Collector, metrics: dict[str, float], sent: int) -> None:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        self.lines = {line["request_id"]: line for line in lines if line["logger"] == "quire.requests"}
        wholes = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
        ids = {span.span_id: str(values(span)["gen_ai.response.id"]) for span in wholes}
        self.spans: dict[str, dict[str, float]] = {name: {} for name in ids.values()}
        for span in collector.spans:
            if span.parent_span_id in ids:
                seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
                self.spans[ids[span.parent_span_id]][span.name] = seconds
        self.metrics, self.sent = metrics, sent

    def observed(self, phase: str) -> tuple[float, float]:
        name = f"quire_request_{phase}_time_seconds"
        return self.metrics[f"{name}_count"], self.metrics[f"{name}_sum"]


def load(server: RunningServer, channel: grpc.Channel, admin: grpc.Channel) -> int:
    """Requests one after the other, and then many at once, of which engines preempt some and a drain moves others.

    Returns:
        Count of the requests.
    """
    stub = server.stub(channel)
    for i in range(ALONE):
        request = stream_request(PROMPT[i:], 100)
        request.request_id = f"alone-{i}"
        list(stub.StreamGenerate(request, timeout=60))

    def stream(i: int, name: str) -> None:
        request = stream_request(PROMPT[20 * i : 20 * i + 100], 240)
        request.request_id = f"crowd-{name}"
        taken = [token for message in stub.StreamGenerate(request, timeout=120) for token in tokens_of(message)]
        if i % 4 == 0:  # a client goes on from what it had
            request.request_id = f"resumed-{name}"
            request.spec.output_prefix.ids.extend(taken[:50])
            list(stub.StreamGenerate(request, timeout=120))

    replicas = admin_grpc.AdminServiceStub(admin)
    with ThreadPoolExecutor(CROWD) as pool:
        for crowd in range(1, CROWDS + 1):
            running = [pool.submit(stream, i, f"{crowd}-{i}") for i in range(CROWD)]
            wait_until(
                lambda streams=running: (
                    server.metrics()["quire_num_requests_running"] > 4 or all(one.done() for one in streams)
                ),
                "several of them run",
            )
            moved = replicas.DrainReplica(admin_pb.DrainReplicaRequest(replica=0)).moved_count
            replicas.ResumeReplica(admin_pb.ResumeReplicaRequest(replica=0))
            for one in running:
                one.result()
            if moved:  # on a slow machine a crowd can be over when the drain comes
                break
    return ALONE + crowd * (CROWD + CROWD // 4)


def tokens_of(message: pb.StreamGenerateResponse) -> list[int]:
    return [token for delta in message.deltas for token in delta.token_ids]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    log = tmp_path_factory.mktemp("phases") / "log"
    flags = ("--replicas", "2", "--kv-cache-memory", "4MiB", "--max-batched-tokens", "64", "--max-sequences", "64")
    with running_collector() as (collector, endpoint):
        told = ("--otlp-traces-endpoint", endpoint, "--log-requests", "--log-format", "json")
        with (
            log.open("w") as file,
            running_server(*flags, *told, stderr=file) as server,
            grpc.insecure_channel(server.address) as channel,
            grpc.insecure_channel(server.admin) as admin,
        ):
            sent = load(server, channel, admin)
            server.wait_for_metric("quire_num_requests_live", 0)
            metrics = server.metrics()
        yield Run(log, collector, metrics, sent)


def test_the_load_was_one(run: Run) -> None:
    assert len(run.lines) == run.sent
    assert run.metrics['quire_requests_moved_total{cause="drain"}'] > 0
    preempted = [value for name, value in run.metrics.items() if name.startswith("quire_num_preemptions_total")]
    assert sum(preempted) > 0


def test_metrics_logs_and_traces_tell_the_same(run: Run) -> None:
    assert run.lines.keys() == run.spans.keys()
    for name, line in run.lines.items():
        told = {phase: line[f"{phase}_seconds"] for phase in PHASES}
        assert run.spans[name] == pytest.approx(told, abs=1e-6), name
    for phase in PHASES:
        told = [line[f"{phase}_seconds"] for line in run.lines.values()]
        assert run.observed(phase) == pytest.approx((len(told), sum(told)), abs=1e-5)


def test_phases_add_up_to_the_latency(run: Run) -> None:
    """The rest is the way of the last token to its client: a few milliseconds of each, and of the median less."""
    rests = []
    for line in run.lines.values():
        phases = sum(line[f"{phase}_seconds"] for phase in PHASES)
        assert phases <= line["seconds"]
        rests.append(1 - phases / line["seconds"])
    assert statistics.median(rests) < 0.1
    assert run.metrics["quire_e2e_request_latency_seconds_sum"] == pytest.approx(
        sum(line["seconds"] for line in run.lines.values()), rel=0.01
    )


def test_the_steps_of_a_prompt_are_prefill_and_a_wait_for_rows_is_queue(run: Run) -> None:
    alone = [line for name, line in run.lines.items() if name.startswith("alone")]
    shares = [line["prefill_seconds"] / line["first_token_seconds"] for line in alone]
    assert max(shares) > 0.5, "nothing was before them: the ten steps of the prompt are most of it"
    assert all(line["prefill_seconds"] > line["decode_seconds"] / 100 for line in alone), "ten steps beside a hundred"
