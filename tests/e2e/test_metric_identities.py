"""Metrics equal what clients counted, after ends of every kind, a kill, a drain, a restart and a refusal.

Engines are stopped (SIGSTOP) where something is counted in the middle: what they had sent arrives, no more comes,
and both sides must agree to the token.
"""

import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import psutil
import pytest
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_grpc
from quire.v1 import generation_service_pb2 as pb

from rpc.observe.metrics import OUTCOMES
from tests.support.call_counts import COUNTED, DELIVERED, FIRSTS, CallCounts, Running, ended
from tests.support.processes import tree, wait_until
from tests.support.secrets import write
from tests.support.server import RunningServer, running_server, stream_request

ENGINE = "rpc.engines.engine_process"
LONG = 900
FLAGS = ("--replicas", "2", "--kv-cache-memory", "64MiB", "--engine-timeout", "60")
GAUGES = (
    "quire_num_requests_running", "quire_num_requests_waiting", "quire_num_tokens_waiting", "quire_kv_pages_used",
    "quire_kv_pages_shared", "quire_kv_pages_if_copied", "quire_kv_slots_unused", "quire_kv_cache_usage_ratio",
    "quire_num_requests_live", "quire_num_requests_parked", "quire_engine_stalled_seconds", "quire_replicas_drained",
)  # fmt: skip


BY_TENANT = {
    "quire_tenant_prompt_tokens_total": "quire_prompt_tokens_total",
    "quire_tenant_prompt_tokens_cached_total": "quire_prompt_tokens_cached_total",
    "quire_tenant_generation_tokens_total": "quire_generation_tokens_total",
}
"""Counters with the label tenant, and their totals."""
ANN, BOB, OPS = "ann-" + "a" * 20, "bob-" + "b" * 20, "ops-" + "o" * 20


class Callers(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Shows these tokens by turns."""

    def __init__(self, *tokens: str) -> None:
        self._tokens = itertools.cycle(tokens)

    @contextmanager
    def only(self, token: str) -> Iterator[None]:
        """Shows this one alone."""
        before, self._tokens = self._tokens, itertools.cycle([token])
        try:
            yield
        finally:
            self._tokens = before

    def _intercept(self, go_on: Any, details: Any, request: Any) -> Any:
        shown = ("authorization", f"Bearer {next(self._tokens)}")
        return go_on(details._replace(metadata=[*(details.metadata or ()), shown]), request)

    intercept_unary_unary = intercept_unary_stream = _intercept


class Rig:
    """A server with two engines that may be silent for long, and its clients."""

    def __init__(self, server: RunningServer, callers: Callers, channel: grpc.Channel, admin: grpc.Channel) -> None:
        self.server, self.callers = server, callers
        self.tally = CallCounts(server.stub(grpc.intercept_channel(channel, callers)))
        self.admin = admin_grpc.AdminServiceStub(admin)

    def streams(self, count: int, seconds: Sequence[int] = ()) -> list[Running]:
        """Long ones, each of which has a token. seconds: that each may take; 60 where none are given."""
        before = self.server.metrics()[FIRSTS]
        requests = [stream_request(f"Scene {i}.", LONG, seed=i) for i in range(count)]
        for one, most in zip(requests, seconds or [60] * count, strict=True):
            one.spec.max_time.seconds = most
        made = [self.tally.stream(one) for one in requests]
        wait_until(lambda: self.server.metrics()[FIRSTS] >= before + count, "a token of each stream")
        return made

    def engines(self) -> list[psutil.Process]:
        """In the order of their numbers."""
        by_pid = {process.pid: process for process in tree(self.server.process.pid) if ENGINE in process.cmdline()}
        replicas = self.admin.ListReplicas(admin_pb.ListReplicasRequest()).replicas
        return [by_pid[int(replica.place.split()[-1])] for replica in replicas if replica.place]

    @contextmanager
    def stopped(self) -> Iterator[list[psutil.Process]]:
        """No engine does anything, and all that they did has arrived."""
        engines = self.engines()
        for engine in engines:
            engine.suspend()
        try:
            self.agree(DELIVERED)
            yield engines
        finally:
            for engine in engines:
                if engine.is_running():
                    engine.resume()

    def requests_on(self, number: int) -> int:
        replicas = self.admin.ListReplicas(admin_pb.ListReplicasRequest()).replicas
        return replicas[number].request_count

    def agree(self, names: tuple[str, ...] = COUNTED) -> None:
        """Once what is on its way has arrived: both sides say the same, and say it for a while."""
        looks: list[dict[str, tuple[float, float]]] = []

        def same() -> bool:
            metrics, counts = self.server.metrics(), self.tally.counts
            looks.append({name: (counts[name], metrics[name]) for name in names})
            return looks[-4:] == [looks[-1]] * 4 and not differing()

        def differing() -> dict[str, tuple[float, float]]:
            return {name: pair for name, pair in looks[-1].items() if pair[0] != pair[1]}

        with suppress(AssertionError):
            wait_until(same, "the same counts", 20)
        assert differing() == {}, "clients, metrics"

    def settle(self, running: list[Running]) -> None:
        """All of them have ended, and everything is counted and given back."""
        for one in running:
            one.done.result(60)
        self.agree((*COUNTED, *map(ended, OUTCOMES)))
        for gauge in GAUGES:
            self.server.wait_for_metric(gauge, 0)
        self.agree_by_tenant()

    def agree_by_tenant(self) -> None:
        """Once all have ended: tenants' counts add up to the totals."""
        now = self.server.metrics()
        totals = BY_TENANT | {f'quire_tenant_requests_total{{outcome="{one}"': ended(one) for one in OUTCOMES}
        sums = {part: sum(value for name, value in now.items() if name.startswith(part)) for part in totals}
        assert sums == {part: now[total] for part, total in totals.items()}

    def value(self, name: str) -> float:
        return self.server.metrics()[name]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    lines = f"ann {ANN}\nbob {BOB}\nops {OPS} operator\n"
    tokens = write(tmp_path_factory.mktemp("tokens") / "tokens", lines.encode())
    with (
        running_server(*FLAGS, "--token-file", tokens) as server,
        grpc.insecure_channel(server.address) as channel,
        grpc.insecure_channel(server.admin) as admin,
    ):
        made = Rig(server, Callers(ANN, ANN, BOB), channel, grpc.intercept_channel(admin, Callers(OPS)))
        yield made
        made.tally.close()


def request(prompt: str, tokens: int, **sampling: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(spec=stream_request(prompt, tokens, **sampling).spec)


def test_ends_of_every_kind(rig: Rig) -> None:
    shared = "It was the nightingale, and not the lark, " * 4
    first = rig.tally.stream(stream_request(shared, 5))
    first.done.result(60)
    running = [rig.tally.stream(stream_request(shared + "A", 9, sequence_count=2))]
    stops = stream_request("KING:", 200, temperature=1, seed=3)
    stops.spec.stopping.stop.append("e")
    running += [rig.tally.stream(stops), rig.tally.stream(stream_request(shared, 1))]
    rig.tally.generate(request("ROMEO:", 7))
    rig.settle(running)
    counts = rig.tally.counts
    assert counts[ended("stop")] == 1
    assert counts["quire_prompt_tokens_cached_total"] > 0, "nothing was cached: that identity is of zeros"


def test_refusals_of_every_kind(rig: Rig) -> None:
    tally, other = rig.tally, request("A", 3)
    other.spec.model = "another"
    twice = stream_request("A", LONG)
    twice.request_id = "twice"
    before = rig.value(FIRSTS)
    with rig.callers.only(BOB):
        first = tally.stream(twice)
        wait_until(lambda: rig.value(FIRSTS) > before, "its first token")
        with rig.stopped():
            tally.stream(twice).done.result(30)
    tally.generate(other)
    tally.generate(request("A", 3, temperature=-1))
    chat = request("", 3)
    chat.spec.chat.messages.add(role="user").parts.add(text="Hello")
    tally.generate(chat)
    tally.batch([request("A", 3), other, request("B", 2, temperature=-1), request("C", 1)])
    rig.settle([first])
    wanted = {"request_id_live": 1, "model_not_found": 2, "invalid_field": 2, "no_chat_template": 1}
    assert {reason: tally.counts[ended(reason)] for reason in wanted} == wanted


def test_streams_that_are_cut_off_count_what_arrived_and_nothing_after(rig: Rig) -> None:
    running = rig.streams(6, seconds=[60, 60, 60, 5, 5, 5])  # at once: none may be over before the engines stop
    cancelled = running[:3]
    with rig.stopped():
        for one in cancelled:
            one.call.cancel()
        rig.server.wait_for_metric(ended("cancelled"), 3)
        now = rig.server.metrics()
        assert now["quire_num_requests_live"] + now[ended("deadline")] == 3
        rig.server.wait_for_metric(ended("deadline"), 3)
    rig.settle(running)
    assert rig.tally.counts[ended("cancelled")] == rig.tally.counts[ended("deadline")] == 3


def test_a_killed_engine_costs_no_count_and_doubles_none(rig: Rig) -> None:
    running = rig.streams(6)
    with rig.stopped() as engines:
        lost = rig.requests_on(1)
        assert 0 < lost < 6
        engines[1].send_signal(signal.SIGKILL)
        rig.server.wait_for_metric("quire_replicas", 1)
        rig.server.wait_for_metric('quire_requests_moved_total{cause="engine_lost"}', lost)
    rig.server.wait_for_metric("quire_replicas", 2)
    rig.settle(running)
    assert rig.value("quire_engine_failures_total") == 1
    assert rig.value("quire_engine_starts_total") == 3
    assert rig.value("quire_request_resubmissions_total") == lost
    assert rig.value("quire_resubmitted_tokens_total") > lost


def test_a_drain_and_a_restart_neither(rig: Rig) -> None:
    running, before = rig.streams(6), rig.value("quire_request_resubmissions_total")
    moved = rig.admin.DrainReplica(admin_pb.DrainReplicaRequest(replica=0)).moved_count
    assert (rig.value("quire_replicas"), rig.value("quire_replicas_drained")) == (1, 1)
    rig.admin.ResumeReplica(admin_pb.ResumeReplicaRequest(replica=0))
    moved += rig.admin.RestartReplica(admin_pb.RestartReplicaRequest(replica=1), timeout=60).moved_count
    rig.settle(running)
    assert moved > 0
    assert rig.value('quire_requests_moved_total{cause="drain"}') == moved
    assert rig.value("quire_request_resubmissions_total") - before == moved
    assert rig.value("quire_engine_failures_total") == 1, "one that is asked to end has not failed"
    assert rig.value("quire_replicas") == rig.value("quire_replicas_wanted") == 2


def test_what_is_refused_while_the_server_drains(rig: Rig) -> None:
    """The last test here: the server ends."""
    running = rig.streams(2)
    rig.server.process.send_signal(signal.SIGTERM)
    with rig.stopped():
        wait_until(lambda: _is_refused(rig), "a refusal")
        rig.agree((*DELIVERED, *map(ended, OUTCOMES)))
    for one in running:
        one.done.result(60)
    assert rig.tally.counts[ended("draining")] == 1
    assert rig.server.process.wait(60) == 0


def _is_refused(rig: Rig) -> bool:
    other = request("A", 1)
    other.spec.model = "another"  # refused in any case: until it drains for that
    rig.tally.generate(other)
    return rig.tally.counts[ended("draining")] > 0
