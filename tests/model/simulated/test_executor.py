"""Any schedule of a simulated engine gives the same tokens, and its steps take the modelled time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.simulated.distribution import CANDIDATES, END, LOGPROBS
from model.simulated.executor import SimulatedExecutor
from model.simulated.rows import SimulatedRows
from model.simulated.timeline import Timeline
from scheduler.controls import Controls, LogitsParams
from scheduler.events import EndReason
from scheduler.parameters import Beam
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan
from tests.model.simulated.engine import PROFILE, Clock, run
from tests.support.examples import examples

SAMPLED = Controls(0.9, 0.95, 20, 0.0, 1)


def request_of(number: int, tokens: int = 40, **controls: object) -> Request:
    """The same for the same number: greedy, sampled, with penalties, or of two sequences."""
    rng = np.random.default_rng(number)
    drawing = replace(SAMPLED, seed=number, temperature=0.0 if number % 4 == 0 else 0.9, **controls)
    if number % 4 == 1:
        drawing = replace(drawing, logits_params=LogitsParams(repetition=1.3, frequency=0.5))
    prompt = rng.integers(300, 2000, rng.integers(1, 120)).astype(np.int32)
    return Request(prompt, tokens, (0, END), drawing, count=2 if number % 4 == 2 else 1)


REQUESTS = [request_of(number) for number in range(12)]
ALONE = [run([request]) for request in REQUESTS]
SCHEDULES = st.builds(
    SchedulerSettings,
    max_batched_tokens=st.integers(8, 300),
    max_sequences=st.integers(2, 8),
    prefill_chunk=st.none() | st.integers(1, 40),
    steps_in_flight=st.sampled_from((1, 2)),
    policy=st.sampled_from(("dominant-share", "first-come", "fair")),
)


def check_schedule(
    schedule: SchedulerSettings, pages: int, executor: type[SimulatedExecutor] = SimulatedExecutor
) -> int:
    """Returns the number of preemptions. Raises AssertionError where tokens depend on the schedule."""
    together = run(REQUESTS, schedule, pages, executor=executor)
    for i, alone in enumerate(ALONE):
        for (_, index), tokens in alone.tokens.items():
            assert together.tokens[i, index] == tokens
            assert together.logprobs[i, index] == alone.logprobs[0, index]
            assert together.ends[i, index] == alone.ends[0, index]
    return together.preemptions


@settings(max_examples=examples(25), deadline=None)
@given(SCHEDULES, st.integers(60, 200))
def test_tokens_do_not_depend_on_the_schedule(schedule: SchedulerSettings, pages: int) -> None:
    check_schedule(schedule, pages)


def test_tokens_survive_preemptions() -> None:
    assert check_schedule(SchedulerSettings(64, 8, steps_in_flight=2), 30) > 0


def test_draft_tokens_change_no_token() -> None:
    check_schedule(SchedulerSettings(64, 4, steps_in_flight=2, draft_tokens=4), 400)


def test_a_beam_search_finds_different_outputs() -> None:
    search = replace(REQUESTS[0], count=3, beam=Beam(4), controls=replace(REQUESTS[0].controls, temperature=0.0))
    found = run([search])
    outputs = {tuple(found.tokens[0, index]) for index in range(3)}
    assert len(outputs) == 3
    assert run([search, *REQUESTS[1:]]).tokens[0, 1] == found.tokens[0, 1]


class ByStep(SimulatedExecutor):
    """A fault: it draws by the number of the step, too."""

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        self.flying[-1][1].tokens[:] += plan.step % 2


def test_an_executor_that_draws_by_the_step_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_schedule(SchedulerSettings(64, 4, steps_in_flight=2), 100, ByStep)


@pytest.mark.parametrize("cut", [1, 7, 39])
def test_an_engine_goes_on_from_the_tokens_of_another(cut: int) -> None:
    single = [i for i, request in enumerate(REQUESTS) if request.count == 1 and len(ALONE[i].tokens[0, 0]) > cut]
    begun = [ALONE[i].tokens[0, 0][:cut] for i in single]
    again = run([REQUESTS[i] for i in single], emitted=begun)
    assert len(single) > 4
    for place, i in enumerate(single):
        assert again.tokens[place, 0] == ALONE[i].tokens[0, 0][cut:]


def test_greedy_output_is_the_prompts_alone_and_sampled_output_the_seeds() -> None:
    greedy, sampled = REQUESTS[0], request_of(3)
    seeds = [run([replace(one, controls=replace(one.controls, seed=9))]).tokens for one in (greedy, sampled)]
    assert seeds[0] == ALONE[0].tokens
    assert seeds[1] != ALONE[3].tokens
    first, second = ALONE[2].tokens[0, 0], ALONE[2].tokens[0, 1]
    assert first != second, "two sequences of one request"


def test_an_output_ends_by_itself_or_goes_on_to_its_bound() -> None:
    requests = [request_of(number, tokens=2000) for number in range(3, 203, 4)]
    ended = run(requests, mean=20.0)
    lengths = [len(tokens) for tokens in ended.tokens.values()]
    assert set(ended.ends.values()) == {EndReason.STOP}
    assert all(tokens.index(END) == len(tokens) - 1 for tokens in ended.tokens.values())
    assert 10 < np.mean(lengths) < 30
    assert len(set(lengths)) > 10
    endless = run([request_of(3, tokens=700)], mean=0)
    assert endless.ends == {(0, 0): EndReason.LENGTH}
    assert len(endless.tokens[0, 0]) == 700


def test_min_tokens_put_the_end_off() -> None:
    params = LogitsParams(not_yet=(0, END), min_tokens=90)
    late = run([request_of(3, tokens=100, logits_params=params)], mean=2.0)
    assert len(late.tokens[0, 0]) == 91


def test_logprobs_are_of_the_candidates() -> None:
    found = run([request_of(3, top_logprobs=5, prompt_logprobs=True)])
    assert found.tokens[0, 0] == ALONE[3].tokens[0, 0]
    for token, chosen, top in zip(found.tokens[0, 0], found.logprobs[0, 0], found.tops[0, 0], strict=True):
        assert len(top) == 5
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert top.get(token, chosen) == chosen <= LOGPROBS[0]
    prompt = request_of(3).prompt
    assert sorted(found.prompts[0]) == list(range(1, len(prompt)))
    assert math.isclose(np.exp(LOGPROBS).sum(), 1, rel_tol=1e-5)
    assert len(LOGPROBS) == CANDIDATES


def test_steps_take_their_time_one_after_the_other() -> None:
    """The second is launched while the first one runs, the third after a pause."""
    clock = Clock(100.0)
    timeline = Timeline(clock)
    assert timeline.launch(2.0) == 102.0
    clock.now = 101.0
    assert timeline.launch(3.0) == 105.0
    clock.now = 110.0
    assert timeline.launch(1.0) == 111.0


class Waits(Timeline):
    """Keeps how long steps take, and until when each was waited for. It waits for nothing."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.seconds: list[float] = []
        self.ends: list[float] = []

    def launch(self, seconds: float) -> float:
        self.seconds.append(seconds)
        return super().launch(seconds)

    def wait(self, end: float) -> None:
        self.ends.append(end)


def test_a_step_is_waited_for_as_long_as_the_profile_says() -> None:
    timeline, costs = Waits(), PROFILE.costs
    executor = SimulatedExecutor(SimulatedRows(4, 0.0), costs, timeline)
    slices = [np.array(rows, np.int32).reshape(-1, 3) for rows in ([[0, 0, 50]], [[0, 50, 1], [1, 0, 200]], [])]
    for step, work in enumerate(slices):
        executor.launch(plan_of(step, work))
    assert [executor.collect().step for _ in slices] == [0, 1, 2]
    assert timeline.seconds == [costs.seconds(slices[0]), costs.seconds(slices[1]), 0.0]
    assert timeline.ends == np.cumsum(timeline.seconds).tolist()


def plan_of(step: int, slices: np.ndarray) -> StepPlan:
    """A plan in which no row draws."""
    pairs, triples = np.empty((0, 2), np.int32), np.empty((0, 4), np.int32)
    rows = np.empty(0, np.int32)
    return StepPlan(step, rows, (), triples, pairs, pairs, pairs, rows, slices, pairs, pairs)


def test_an_interrupt_ends_waits() -> None:
    timeline = Timeline(Clock(0.0))
    end = timeline.launch(1e6)
    timeline.interrupt()
    timeline.wait(end)
    timeline.wait(timeline.launch(1e6))
