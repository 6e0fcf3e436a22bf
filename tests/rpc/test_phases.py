"""Queue, prefill and decode of a request: from the engine's clock, without gaps, the same in metrics, logs, traces."""

import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.errors import RequestFailed
from rpc.frontend.live import Live
from rpc.observe.records import RequestRecord
from rpc.observe.request_log import log_request
from rpc.observe.tracing import Traces
from scheduler.events import EndReason
from scheduler.spec import Spec
from tests.support.fleet import Fleet, opened

PHASES = ("queue", "prefill", "decode")


class Clock:
    """In place of the module `time`, for the frontend: time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("dispatch", "intake", "reporting"):
        monkeypatch.setattr(f"rpc.frontend.{module}.time", made)
    return made


class Seen:
    """All that is reported of the requests of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.records: list[RequestRecord] = []
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self._fleet = fleet
        fleet.frontend.reporter.watchers += [self.records.append, log_request, Traces(provider)]

    def observed(self, phase: str) -> tuple[float, float]:
        """Count and sum of the phase's histogram."""
        name, value = f"quire_request_{phase}_time_seconds", self._fleet.metrics.registry.get_sample_value
        count, total = (value(f"{name}_{what}", {"model_name": "m"}) for what in ("count", "sum"))
        assert count is not None
        assert total is not None
        return count, total


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "quire.requests"):
        yield caplog


async def test_phases_come_from_the_engines_clock_and_leave_no_gap(
    tokenizer: Tokenizer, clock: Clock, logged: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(tokenizer)
    seen = Seen(fleet)
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1)
        clock.now += 1.0  # 0.25 s in the queue; the step that gave it a row and its first token took 0.75 s
        fleet.tell(live, (0, 70), start=True, age=0.75)
        clock.now += 2.0
        fleet.tell(live, (1, 71), end=EndReason.LENGTH)
    wanted = {"queue": 0.25, "prefill": 0.75, "decode": 2.0}
    (record,) = seen.records
    assert {phase.name: phase.seconds for phase in record.phases} == wanted
    assert sum(wanted.values()) == record.seconds
    assert {phase: seen.observed(phase) for phase in PHASES} == {name: (1, took) for name, took in wanted.items()}
    (line,) = [entry for entry in logged.records if entry.name == "quire.requests"]
    assert {name: getattr(line, f"{name}_seconds") for name in PHASES} == wanted
    assert (line.first_token_seconds, line.seconds) == (1.0, 3.0)
    *phases, whole = seen.spans.get_finished_spans()
    assert [(span.name, (span.end_time - span.start_time) / 1e9) for span in phases] == list(wanted.items())
    assert [a.end_time for a in phases] == [*(b.start_time for b in phases[1:]), whole.end_time]
    assert phases[0].start_time == whole.start_time


def move(fleet: Fleet, live: Live) -> None:
    """Its engine is drained for a moment, and it goes on with the other one."""
    place = fleet.place_of(live)
    fleet.frontend.drain_replica(place)
    fleet.frontend.resume_replica(place)


async def test_a_request_that_moves_keeps_its_first_row_and_its_time_is_in_one_phase_or_another(
    tokenizer: Tokenizer, clock: Clock
) -> None:
    fleet = Fleet(tokenizer)
    seen = Seen(fleet)
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1)
        clock.now += 1.0  # its first engine dies before it gave it a row: it still waits
        place = fleet.place_of(live)
        fleet.kill(place)
        fleet.bring(place)
        clock.now += 1.0
        fleet.tell(live, start=True, age=0.5)
        clock.now += 1.0  # the second is drained during its prefill, which begins anew
        move(fleet, live)
        clock.now += 1.0
        fleet.tell(live, (0, 70), start=True, age=0.5)
        clock.now += 1.0  # and the third while it decodes
        move(fleet, live)
        clock.now += 1.0
        fleet.tell(live, (1, 71), end=EndReason.LENGTH, start=True, age=0.5)
    (record,) = seen.records
    assert [(phase.name, phase.seconds) for phase in record.phases] == [("queue", 1.5), ("prefill", 2.5), ("decode", 2)]
    assert sum(phase.seconds for phase in record.phases) == record.seconds == 6
    assert [seen.observed(phase) for phase in PHASES] == [(1, 1.5), (1, 2.5), (1, 2)]


async def test_no_engine_serves_what_was_not_sent(tokenizer: Tokenizer, clock: Clock) -> None:
    """Its clock may run faster than this one's."""
    fleet = Fleet(tokenizer)
    seen = Seen(fleet)
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1)
        clock.now += 1.0
        fleet.tell(live, (0, 70), start=True, end=EndReason.LENGTH, age=7.0)
    assert [(phase.name, phase.seconds) for phase in seen.records[0].phases] == [
        ("queue", 0), ("prefill", 1), ("decode", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("told", "phases"),
    [
        ((), [("queue", 3)]),
        (("start",), [("queue", 0.5), ("prefill", 2.5)]),
        (("start", "token"), [("queue", 0.5), ("prefill", 1.5), ("decode", 0)]),
    ],
)
async def test_a_request_that_is_cut_short_ends_in_the_phase_that_it_was_in(
    tokenizer: Tokenizer, clock: Clock, told: tuple[str, ...], phases: list[tuple[str, float]]
) -> None:
    fleet = Fleet(tokenizer)
    seen = Seen(fleet)
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1)
        clock.now += 1.0
        if "start" in told:
            fleet.tell(live, start=True, age=0.5)
        clock.now += 1.0
        if "token" in told:
            fleet.tell(live, (0, 70))
        clock.now += 1.0
    (record,) = seen.records
    assert (record.outcome, record.seconds) == ("cancelled", 3)
    assert [(phase.name, phase.seconds) for phase in record.phases] == phases


async def test_a_request_that_is_refused_has_no_phase(tokenizer: Tokenizer, clock: Clock) -> None:
    fleet = Fleet(tokenizer)
    seen = Seen(fleet)
    with pytest.raises(RequestFailed):
        async with fleet.frontend.open(Spec("cat", model="another"), "r", None):
            pass
    assert seen.records[0].phases == ()
    assert [span.name for span in seen.spans.get_finished_spans()] == ["text_completion m"]
