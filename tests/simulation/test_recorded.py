"""A simulation serves the recorded requests as they were served, and otherwise where settings are others."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from cache_manager.block_hash import BlockHasher
from rpc.simulation.recorded import Trace, simulate
from scheduler.blueprint import Blueprint
from scheduler.events import Abort, EndReason, Event, Ready, Submit
from scheduler.parameters import Beam
from scheduler.recording import RecordedScheduler, Recorder
from scheduler.replaying import Recording, RecordingError
from scheduler.settings import RecordSettings, SchedulerSettings
from scheduler.step import StepPlan, StepResult
from scheduler.step_costs import StepCosts, StepWork
from tests.scheduler.executor import logprobs_of
from tests.scheduler.recorded import KEY, Lines, driven, recorder_of
from tests.scheduler.test_step_time import CPU, Machine
from tests.scheduler.workloads import PATIENT, SECRET, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.planted import plant

pytestmark = pytest.mark.sample(3)

SHORT = SchedulerSettings(max_batched_tokens=128, max_sequences=16)
FINISHED = (EndReason.STOP, EndReason.LENGTH)


def blueprint(settings: SchedulerSettings = SHORT, pages: int = 120) -> Blueprint:
    return Blueprint(settings, PATIENT, make_layout(16), pages, "lru")


def submits(count: int, rate: float, seed: int) -> list[tuple[float, Submit]]:
    """Requests of all lengths, some of which begin alike, at random times."""
    rng = np.random.default_rng(seed)
    times, common = np.cumsum(rng.exponential(1 / rate, count)), tuple(range(1, 9)) * 8
    made = []
    for number, at in enumerate(times.tolist()):
        own = tuple(rng.integers(1, 9, rng.integers(4, 120)).tolist())
        prompt = common + own if number % 3 == 0 else own
        made.append((at, Submit(number, make_request(number, prompt, int(rng.integers(2, 60)), stop_ids=(12,)))))
    return made


def served(
    coming: list[tuple[float, Submit]], made: Blueprint, machine: Machine, lines: list[str] | None = None
) -> Recording:
    """Serves requests on a machine's time, and returns the recording. lines: gets its lines."""
    lines = [] if lines is None else lines
    serve(coming, made, machine, recorder_of(made, lines, False))
    return Recording.parse(lines)


def serve(coming: list[tuple[float, Submit]], made: Blueprint, machine: Machine, recorder: Recorder) -> None:
    """Serves requests on a machine's time. Every 40th token is a stop token."""
    now, coming = 0.0, list(coming)
    hasher = BlockHasher(SECRET, b"model", 16)
    scheduler = RecordedScheduler(made, made.cache(), hasher, recorder)
    flying: list[StepPlan] = []

    def result_of(plan: StepPlan) -> StepResult:
        tokens = np.array(
            [12 if (plan.step + 7 * row) % 40 == 0 else 5 for row in plan.logits[:, 1].tolist()], np.int32
        )
        return StepResult(plan.step, tokens, logprobs_of(tokens))

    while coming or scheduler.has_work or scheduler.has_news:
        if not (flying or scheduler.has_work or scheduler.has_news):
            now = max(now, coming[0][0])  # an engine without work waits for a request
        events: list[Event] = []
        while coming and coming[0][0] <= now:
            events.append(coming.pop(0)[1])
        plan = scheduler.schedule(now, events)
        if plan is not None:
            flying.append(plan)
        if flying and (plan is None or len(flying) == made.settings.depth):
            done = flying.pop(0)
            now += machine.seconds(StepWork.of(done.slices))
            scheduler.commit(result_of(done), now)
        elif plan is None:
            scheduler.commit(None, now)
            now = max(now, coming[0][0]) if coming else now


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rate", [2.0, 8.0, 40.0])
def test_the_same_settings_give_the_recorded_figures(rate: float, depth: int) -> None:
    """On a machine whose steps take what the model can say, within 3 %, also under overload."""
    made = blueprint(replace(SHORT, steps_in_flight=depth))
    trace = Trace.of(served(submits(60, rate, 3), made, CPU))
    recorded, simulated = trace.serving.figures(), simulate(trace).figures()
    for name, value in recorded.items():
        assert simulated[name] == pytest.approx(value, rel=0.03, abs=0.02), name
    assert simulate(trace).ledger.tokens.tolist() == trace.serving.ledger.tokens.tolist()


def test_slowness_is_how_much_longer_steps_took() -> None:
    trace = Trace.of(served(submits(40, 10.0, 1), blueprint(), CPU))
    assert trace.slowness(trace.costs) == pytest.approx(1, rel=0.01)
    assert trace.slowness(trace.costs.faster(2)) == pytest.approx(2 * trace.slowness(trace.costs))
    nothing = Trace.of(served([], blueprint(), CPU))
    assert nothing.slowness(trace.costs) == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [1, 2])
def test_what_the_end_of_a_recording_cut_off_ends_with_the_tokens_that_it_had(depth: int, count: int) -> None:
    lines: list[str] = []
    settings = replace(SHORT, steps_in_flight=depth)
    coming = [(at, replace(one, request=replace(one.request, count=count))) for at, one in submits(40, 20.0, 3)]
    whole = Trace.of(served(coming, blueprint(settings), CPU, lines))
    cut = Trace.of(Recording.parse(lines[: len(lines) // 2]))
    begun = {number: len(one.tokens) for number, one in cut.requests.items() if one.tokens}
    assert sum(begun.values()) < sum(len(one.tokens) for one in whole.requests.values())
    assert any(not one.whole and one.tokens for one in cut.requests.values())
    assert any(one.is_left and not one.tokens for one in cut.requests.values())
    assert cut.serving.ledger.reasons.keys() | cut.serving.ledger.cut == set(cut.requests)
    for changed in (None, blueprint(settings, pages=2000)):
        ledger = simulate(cut, changed).ledger
        for number, tokens in begun.items():
            assert tokens <= ledger.tokens[number] < tokens + count


def recorded_scheduler(made: Blueprint, lines: list[str]) -> RecordedScheduler:
    return RecordedScheduler(made, made.cache(), BlockHasher(SECRET, b"model", 16), recorder_of(made, lines, False))


def test_what_failed_before_its_first_token_is_left() -> None:
    lines: list[str] = []
    scheduler = recorded_scheduler(replace(blueprint(), holds=True), lines)
    scheduler.schedule(0.0, [Submit(0, make_request(0, 40, 30))])
    scheduler.schedule(1.0, [Ready(0, "its grammar is too large")])
    scheduler.commit(None, 1.0)
    trace = Trace.of(Recording.parse(lines))
    assert trace.serving.ledger.reasons == {0: EndReason.FAULT}
    simulated = simulate(trace)
    assert simulated.ledger.tokens[0] == 0
    assert (simulated.ledger.cut, simulated.seconds) == ({0}, pytest.approx(1.0))


@pytest.mark.parametrize("drawn", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_its_client_ends_draws_the_recorded_tokens(depth: int, drawn: int) -> None:
    made, lines = blueprint(replace(SHORT, steps_in_flight=depth)), list[str]()
    scheduler = recorded_scheduler(made, lines)
    events: list[Event] = [Submit(0, make_request(0, 40, 30))]
    for step in range(drawn):
        plan = scheduler.schedule(float(step), events)
        assert plan is not None
        tokens, events = np.array([5], np.int32), []
        scheduler.commit(StepResult(plan.step, tokens, logprobs_of(tokens)), step + 0.5)
    scheduler.schedule(float(drawn), [Abort(0)])
    scheduler.commit(None, float(drawn))
    trace = Trace.of(Recording.parse(lines))
    assert trace.serving.ledger.reasons == {0: EndReason.FINISHED}
    assert simulate(trace).ledger.tokens.tolist() == trace.serving.ledger.tokens.tolist() == [drawn]


def test_a_request_that_came_with_more_than_the_pages_hold_is_refused() -> None:
    lines: list[str] = []
    came = Submit(0, make_request(0, 50, 700), emitted=((5,) * 600,), again=True)
    recorded_scheduler(blueprint(), lines).schedule(0.0, [came])
    with pytest.raises(ValueError, match="more than the"):
        simulate(Trace.of(Recording.parse(lines)), blueprint(pages=30))


def test_fewer_pages_serve_what_was_short_though_it_might_have_been_long() -> None:
    longest = blueprint().layout.tokens_in(120, 2)
    coming = [
        (at, replace(one, request=replace(one.request, max_tokens=longest - 200))) for at, one in submits(20, 8.0, 3)
    ]
    trace = Trace.of(served(coming, blueprint(), CPU))
    fewer = simulate(trace, blueprint(pages=40))
    assert {*fewer.ledger.reasons.values()} == {EndReason.STOP}
    with pytest.raises(ValueError, match=r"a request that came at .* s may have .* tokens, more than the"):
        simulate(trace, blueprint(pages=10))


def test_two_simulations_are_equal() -> None:
    trace = Trace.of(served(submits(40, 10.0, 1), blueprint(), CPU))
    first, second = (json.dumps(simulate(trace).figures()) for _ in range(2))
    assert first == second


def test_settings_change_what_would_have_been() -> None:
    trace = Trace.of(served(submits(60, 40.0, 2), blueprint(pages=400), CPU))
    few_pages = simulate(trace, blueprint(pages=24))
    assert few_pages.preemptions > trace.serving.preemptions == 0
    assert few_pages.figures()["seconds"] > 1.2 * trace.serving.seconds
    paced = replace(SHORT, target_itl=0.06)
    slow = simulate(trace, blueprint(paced, pages=400)).figures()
    assert slow["a token after it, s, p99"] < 0.8 * trace.serving.figures()["a token after it, s, p99"]
    assert slow["first token, s, p90"] > trace.serving.figures()["first token, s, p90"]


@settings(max_examples=examples(60), deadline=None)
@given(workloads(cancels=True, resumed=True, queue_timeout=True, several=False))
def test_whoever_ends_has_the_recorded_output(workload: Workload) -> None:
    if any(arrival.request.beam is not None for arrival in workload.arrivals):
        return
    trace = Trace.of(Recording.parse(driven(workload)))
    found = simulate(trace)
    before, after = trace.serving.ledger, found.ledger
    assert len(after.came) == len(before.came)
    for number, reason in before.reasons.items():
        if reason in FINISHED and after.reasons.get(number) in FINISHED:
            assert (after.tokens[number], after.reasons[number]) == (before.tokens[number], reason)


def test_a_beam_search_is_not_simulated() -> None:
    request = replace(make_request(1, 5, 4), beam=Beam(2))
    lines: list[str] = []
    made = blueprint()
    scheduler = RecordedScheduler(made, made.cache(), BlockHasher(SECRET, b"model", 16), recorder_of(made, lines, True))
    scheduler.schedule(0.0, [Submit(1, request)])
    with pytest.raises(RecordingError, match="beam search"):
        Trace.of(Recording.parse(lines))


def ten_percent_longer(real):
    return lambda self, slices: 1.1 * real(self, slices)


def all_at_once(real):
    def events(one, longest, speed):
        return [replace(timed, at=0.0) for timed in real(one, longest, speed)]

    return events


@pytest.mark.parametrize("name", ["steps take longer", "all come at once"])
def test_a_wrong_model_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "steps take longer":
        plant(monkeypatch, StepCosts, "seconds", ten_percent_longer)
    else:
        from rpc.simulation import recorded

        plant(monkeypatch, recorded, "_events", all_at_once)
    with pytest.raises(AssertionError):
        test_the_same_settings_give_the_recorded_figures(8.0, 1)


def test_a_later_part_of_a_recording_has_the_requests_that_came_in_it() -> None:
    lines, made = Lines([]), blueprint(replace(SHORT, steps_in_flight=2))
    whole = Trace.of(served(submits(60, 20.0, 3), made, CPU))
    serve(submits(60, 20.0, 3), made, CPU, Recorder(made, RecordSettings("file", 30), KEY, lines))
    parts = [Trace.of(Recording.parse(part)) for part in lines.parts]
    assert len(parts) > 3
    assert sum(len(part.requests) for part in parts) == len(whole.requests)
    assert sum(len(part.steps) for part in parts) > len(whole.steps) - 2 * len(parts)
    for part in parts:
        ended = [number for number, one in part.requests.items() if one.whole]
        assert simulate(part).ledger.tokens[ended].tolist() == part.serving.ledger.tokens[ended].tolist()
        assert part.slowness(whole.costs) == pytest.approx(1.0, abs=0.05)
    for count in ("preemptions", "hits", "queries"):
        assert sum(getattr(part.serving, count) for part in parts) == getattr(whole.serving, count)
