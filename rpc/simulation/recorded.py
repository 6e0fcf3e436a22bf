"""What a recorded time would have been with other settings: its requests, the scheduler itself, a modelled clock.

The simulation runs the scheduler itself, on a clock that goes on by the costs of each step, which are fitted to the
recorded steps. A request comes when it came, draws what it drew, and its client leaves as long after its arrival as it
did; one that left after some tokens leaves after as many, as at a stop string, but a single one of several sequences
when it was left. A request whose own end the recording does not have, as it failed or the recording ended first, ends
after the tokens that it had. Two simulations of one recording are equal.

What it does not model: faults, time outside of the engine, swaps to the host, tokens that a constraint forced (each is
drawn), outputs of requests that were refused (they take all of their `max_tokens`), and clients that would have done
otherwise. `Trace.serving` says how the recorded time was, so that a simulation with the same settings shows what the
model is worth.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rpc.simulation.cluster import Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.engine import Draws, Ints
from rpc.simulation.fitting import costs_of
from rpc.simulation.served import REFUSED, WHOLE, Ledger, Serving
from rpc.simulation.traffic import Timed
from scheduler.blueprint import Blueprint
from scheduler.events import Abort, End, EndReason, Event, Ready, StepOutputs, Submit
from scheduler.profile import Profile
from scheduler.replaying import Recording, RecordingError, Replay
from scheduler.rows import Rows
from scheduler.stand_ins import FILLER
from scheduler.step import StepPlan
from scheduler.step_costs import StepCosts, StepWork

AT_ONCE = 0.01  # seconds after a step's result in which the engine takes what came while it ran


@dataclass(slots=True, eq=False)
class TracedRequest:
    """A request of a recording.

    Attributes:
        at: Seconds at which it came: in the middle of the step that ran meanwhile, as the recording does not say when.
        submit: Its event. Its attempt is its number among the requests, from 0.
        ready: Seconds from its arrival until its grammar or processors were ready; 0 without any.
        tokens: Output tokens by sequence and position.
        left: Seconds from its arrival until its client left, and the sequence that it left; None for all of them.
        over: Seconds at which all of it was over; None where the recording ended first.
        whole: It ended by itself.
    """

    at: float
    submit: Submit
    ready: float = 0.0
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    left: list[tuple[float, int | None]] = field(default_factory=list)
    over: float | None = None
    whole: bool = False

    @property
    def stops(self) -> bool:
        """Whether it ends after its recorded tokens, though nothing that it drew says so."""
        return bool(self.tokens) and (self.is_left or not self.whole)

    @property
    def is_left(self) -> bool:
        """Whether its client left all of it."""
        return any(index is None for _, index in self.left)

    @property
    def longest(self) -> int:
        """Recorded tokens of its longest sequence, with those that it came with."""
        came = max((len(tokens) for tokens in self.submit.emitted if tokens is not None), default=0)
        return max(came, max((position + 1 for _, position in self.tokens), default=0))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests, costs and figures of a recording, for simulations.

    Attributes:
        blueprint: Of the recorded scheduler.
        requests: By number, in order of arrival.
        costs: Fitted to the recorded steps.
        errors: [steps] float64. By how much of its time each step's prediction is wrong.
        prefills: [steps] bool. Steps that had prefill.
        steps: Work and seconds of each step.
        serving: How the recorded time was served.
        page_size: Tokens of the pages whose hashes stand for the prompts; None where those have their tokens.
    """

    blueprint: Blueprint
    requests: Mapping[int, TracedRequest]
    costs: StepCosts
    errors: NDArray[np.float64]
    prefills: NDArray[np.bool_]
    steps: Sequence[tuple[StepWork, float]]
    serving: Serving
    page_size: int | None

    def profile(self, name: str) -> Profile:
        """Returns the recorded engine. Its context is the longest sequence that its pool holds."""
        made, steps = self.blueprint, len(self.errors)
        source = f"Fitted to {steps:,} recorded steps; half of them are predicted within {np.median(self.errors):.1%}"
        if self.prefills.any():
            source += f", of those with prefill within {np.median(self.errors[self.prefills]):.1%}"
        source += "."
        context = made.layout.tokens_in(made.pages, made.settings.ahead) + 1
        return Profile(name, source if steps else "No step was recorded.", context, self.costs, made)

    def slowness(self, costs: StepCosts) -> float:
        """Returns how many times as long the recorded steps took as they would by these costs; 1 without steps."""
        predicted = sum(costs.seconds_of(work) for work, _ in self.steps)
        return sum(seconds for _, seconds in self.steps) / predicted if predicted else 1.0

    @staticmethod
    def of(recording: Recording) -> "Trace":
        """Replays a recording.

        Raises:
            RecordingError: It is none of this version, does not replay to the same plans, or has a beam search.
        """
        live = set(recording.live)
        came_here = (attempt for attempt in recording.attempts if attempt not in live)
        numbers = {attempt: number for number, attempt in enumerate(came_here)}
        replay, ledger = Replay(recording), Ledger(len(numbers))
        begun, planned_before = replay.scheduler.stats(), replay.scheduler.steps_in_flight
        requests = dict[int, TracedRequest]()
        launched, last, busy = deque[tuple[float, StepPlan]](), -math.inf, 0.0
        steps = list[tuple[StepWork, float]]()
        before, ended = math.inf, math.inf  # times of the last step's plan and result, between which others came
        call_began = call_ended = 0.0
        for number, call in enumerate(replay):
            call_began, call_ended = call_began if number else call.now, call.now
            outputs = None if call.outputs is None else _numbered(call.outputs, numbers)
            if outputs is not None:
                ledger.take(outputs, call.now)
                for end in outputs.ends:
                    _end(requests[end.attempt], end, call.now)
            for event in call.events:
                waited = call.now - ended < AT_ONCE  # else the engine was idle: what comes then is taken at once
                came = (min(before, call.now) + call.now) / 2 if waited else call.now
                if isinstance(event, Submit):
                    ledger.arrive(numbers[event.attempt], came, event.request.count)
                _trace(requests, numbers, event, came)
            if call.plan is not None:
                launched.append((call.now, call.plan))
            if outputs is None:
                before, ended = math.inf if call.plan is None else call.now, math.inf
                continue
            ended = call.now
            for i, number in enumerate(outputs.attempts.tolist()):
                place = int(outputs.indices[i]), int(outputs.positions[i])
                requests[number].tokens[place] = int(outputs.tokens[i])
            if outputs.step_seconds and planned_before:
                planned_before, last = planned_before - 1, call.now
            elif outputs.step_seconds:
                began, plan = launched.popleft()
                seconds, last = call.now - max(began, last), call.now
                steps.append((StepWork.of(plan.slices), seconds))
                busy += seconds
        if replay.difference is not None:
            raise RecordingError(f"step {replay.difference.step} differs: another version has decided otherwise")
        _end_all(requests, ledger, call_ended)
        first = min((one.at for one in requests.values()), default=0.0) if not live else call_began
        stats, lasted = replay.scheduler.stats(), max(last - first, 0.0)
        counts = (
            stats.preemptions - begun.preemptions,
            stats.prefix_hits - begun.prefix_hits,
            stats.prefix_queries - begun.prefix_queries,
        )
        preempted = {cause: count - begun.preempted[cause] for cause, count in stats.preempted.items()}
        costs = costs_of(steps)
        predicted, took = np.array([(costs.seconds_of(work), seconds) for work, seconds in steps]).reshape(-1, 2).T
        errors = np.abs(predicted - took) / np.maximum(took, 1e-9)
        prefills = np.array([work.prefill > 0 for work, _ in steps], np.bool_)
        serving = Serving(ledger, lasted, *counts, busy, lasted, preempted)
        made = recording.blueprint
        page_size = made.layout.page_size if made.prefix_cache and not recording.tokens else None
        return Trace(made, requests, costs, errors, prefills, steps, serving, page_size)


def _numbered(outputs: StepOutputs, numbers: Mapping[int, int]) -> StepOutputs:
    """Returns outputs with numbers of requests in place of attempts, without attempts that have none."""
    each = outputs.attempts.tolist()
    known = np.array([attempt in numbers for attempt in each], np.bool_)
    attempts = np.array([numbers[attempt] for attempt in each if attempt in numbers], np.int64)
    indices, positions, tokens = outputs.indices[known], outputs.positions[known], outputs.tokens[known]
    ends = tuple(replace(end, attempt=numbers[end.attempt]) for end in outputs.ends if end.attempt in numbers)
    return replace(outputs, attempts=attempts, indices=indices, positions=positions, tokens=tokens, ends=ends)


def _trace(requests: dict[int, TracedRequest], numbers: Mapping[int, int], event: Event, now: float) -> None:
    if isinstance(event, Submit):
        if event.request.beam is not None:
            raise RecordingError("it has a beam search, whose draws depend on the schedule's own results")
        number = numbers[event.attempt]
        requests[number] = TracedRequest(now, replace(event, attempt=number))
    elif isinstance(event, Ready) and (one := requests.get(numbers.get(event.attempt, -1))) is not None:
        one.ready = one.ready or now - one.at
    elif isinstance(event, Abort) and (one := requests.get(numbers.get(event.attempt, -1))) is not None:
        one.left.append((now - one.at, event.index))


def _end(one: TracedRequest, end: End, now: float) -> None:
    if not end.more:
        one.over, one.whole = now, end.reason in WHOLE


def _end_all(requests: Mapping[int, TracedRequest], ledger: Ledger, now: float) -> None:
    """Ends what the recording leaves open, and lets clients leave what failed. now: seconds of the recording's end."""
    for number, one in requests.items():
        if one.is_left and not one.tokens:
            ledger.cut.add(number)
        elif one.over is None and not one.is_left:
            if one.tokens:
                ledger.reasons[number] = EndReason.FINISHED
            else:
                ledger.cut.add(number)
        if not (one.whole or one.tokens or one.is_left or ledger.reasons.get(number) in REFUSED):
            one.left.append(((now if one.over is None else one.over) - one.at, None))


def simulate(trace: Trace, blueprint: Blueprint | None = None, replicas: int = 1) -> Serving:
    """Serves the requests of a recorded time with other settings.

    Args:
        trace: The recorded time.
        blueprint: Of the simulated schedulers; None for the recorded one.
        replicas: Engines.

    Returns:
        How they were served.
    """
    deployment = Deployment(blueprint or trace.blueprint, trace.costs, replicas)
    traffic, held, stops = recorded_traffic(trace, deployment.longest), recorded_holds(trace), recorded_stops(trace)
    return Cluster(deployment, traffic, recorded_draws(trace), held, stops).run()


def recorded_traffic(trace: Trace, longest: int, speed: float = 1.0) -> list[Timed]:
    """Returns what clients did in a recorded time.

    Args:
        trace: The recorded time.
        longest: Tokens of the longest sequence that an engine takes. A request that may have more, and had not, may
            have as many: without `max_tokens` it could have had all that the recorded engine took.
        speed: Factor of the rate at which requests come.
    """
    return [timed for one in trace.requests.values() for timed in _events(one, longest, speed)]


def recorded_holds(trace: Trace) -> dict[int, float]:
    """Returns the seconds for which requests were held at first."""
    return {number: one.ready for number, one in trace.requests.items()}


def recorded_stops(trace: Trace) -> dict[int, int]:
    """Returns the tokens after which requests end that did not end by themselves, and had some.

    Most of them met a stop string, which the frontend finds.
    """
    return {number: len(one.tokens) for number, one in trace.requests.items() if one.stops}


def recorded_draws(trace: Trace) -> Callable[[Ledger], Draws]:
    """Returns what makes the draws of the recorded tokens, for a simulation's ledger."""
    tokens = {number: one.tokens for number, one in trace.requests.items()}

    def of(ledger: Ledger) -> Draws:
        def draws(rows: Rows, drawing: NDArray[np.intp]) -> Ints:
            positions = rows.length[drawing] - rows.prompt[drawing] - 1
            each = zip(rows.attempt[drawing].tolist(), rows.index[drawing].tolist(), positions.tolist(), strict=True)
            drawn = [tokens[ledger.request_of(one)].get((index, position), FILLER) for one, index, position in each]
            return np.array(drawn, np.int32)

        return draws

    return of


def _events(one: TracedRequest, longest: int, speed: float) -> Iterator[Timed]:
    """Yields what comes of a request."""
    number, at, request = one.submit.attempt, one.at / speed, one.submit.request
    most = max(longest - len(request.prompt), one.longest, 1)
    yield Timed(at, number, replace(one.submit, request=replace(request, max_tokens=min(request.max_tokens, most))))
    for after, index in one.left:
        if index is not None or not one.stops:
            yield Timed(at + after, number, Abort(number, index))
