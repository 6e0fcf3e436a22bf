"""What a recorded time would have been with other settings: its requests, the scheduler itself, a modelled clock.

The simulation runs the scheduler itself, on a clock that goes on by what `StepTime` predicts for each step. The
prediction is fitted to the recorded steps. A request comes when it came, draws what it drew, and its client leaves as
long after its arrival as it did. Two simulations of one recording are equal.

What it does not model: faults, time outside of the engine, swaps to the host, tokens that a constraint forced (each is
drawn), and clients that would have done otherwise. `Trace.serving` says how the recorded time was, so that a simulation
with the same settings shows what the model is worth.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cache_manager.block_hash import BlockHasher
from scheduler.blueprint import Blueprint
from scheduler.events import Abort, EndReason, Event, Logprobs, Ready, StepOutputs, Submit
from scheduler.replaying import REPLAY_SECRET, Recording, RecordingError, Replay
from scheduler.scheduler import Scheduler
from scheduler.stand_ins import FILLER
from scheduler.step import StepPlan, StepResult
from scheduler.step_time import StepTime

ALL_STEPS = 1.0  # memory of the fit: the first step counts as the last one


@dataclass(slots=True, eq=False)
class TracedRequest:
    """A request of a recording.

    Attributes:
        at: Seconds at which it came: in the middle of the step that ran meanwhile, as the recording does not say when.
        submit: Its event.
        ready: Seconds from its arrival until its grammar or processors were ready; 0 without any.
        tokens: Output tokens by sequence and position.
        left: Seconds from its arrival until its client left, and the sequence that it left; None for all of them.
    """

    at: float
    submit: Submit
    ready: float = 0.0
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    left: list[tuple[float, int | None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ServedRequest:
    """How a request was served. Times are seconds on the engine's clock.

    Attributes:
        came: Its arrival.
        first: Time of its first token; None without one.
        last: Time of its last token.
        tokens: Output tokens.
        reason: Why it ended; None where its client left, or the recording ended before it.
    """

    came: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    reason: EndReason | None = None


class Ledger:
    """Books how requests are served, from a scheduler's calls.

    Attributes:
        served: By attempt, in order of arrival.
    """

    def __init__(self) -> None:
        self.served: dict[int, ServedRequest] = {}

    def came(self, event: Event, at: float) -> None:
        """Books the arrival of a request. at: seconds."""
        if isinstance(event, Submit):
            self.served[event.attempt] = ServedRequest(at)

    def take(self, now: float, outputs: StepOutputs | None) -> None:
        """Books what a call gave. now: seconds."""
        if outputs is None:
            return
        for attempt in outputs.attempts.tolist():
            one = self.served[attempt]
            one.first = now if one.first is None else one.first
            one.last, one.tokens = now, one.tokens + 1
        for end in outputs.ends:
            self.served[end.attempt].reason = end.reason


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """How a time was served.

    Attributes:
        requests: Its requests.
        seconds: From the first arrival to the end of the last request.
        preemptions: Sequences that lost their rows.
        hits: Prompt tokens that were in the prefix cache, of `queries` that were looked up.
        queries: See `hits`.
        busy: Seconds in which a step ran.
    """

    requests: list[ServedRequest]
    seconds: float
    preemptions: int
    hits: int
    queries: int
    busy: float

    def figures(self) -> dict[str, float]:
        """Returns figures by name. Seconds of a request are percentiles over those that had a token."""
        begun = [one for one in self.requests if one.first is not None]
        first = [one.first - one.came for one in begun if one.first is not None]
        gaps = [(one.last - one.first) / (one.tokens - 1) for one in begun if one.first is not None and one.tokens > 1]
        whole = [one.last - one.came for one in begun if one.reason in (EndReason.STOP, EndReason.LENGTH)]
        refused = sum(one.reason in (EndReason.QUEUE_FULL, EndReason.QUEUE_TIMEOUT) for one in self.requests)
        tokens = sum(one.tokens for one in self.requests)
        return {
            "requests": len(self.requests),
            "refused": refused,
            "seconds": self.seconds,
            "busy part": self.busy / self.seconds if self.seconds else 0.0,
            "tokens a second": tokens / self.seconds if self.seconds else 0.0,
            **_percentiles("first token, s", first),
            **_percentiles("a token after it, s", gaps),
            **_percentiles("whole request, s", whole),
            "preemptions": self.preemptions,
            "prefix hits": self.hits / self.queries if self.queries else 0.0,
        }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    found = np.percentile(values, [50, 90, 99]).tolist() if values else [math.nan] * 3
    return {f"{name}, p{percent}": value for percent, value in zip((50, 90, 99), found, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Parts of a recording that a simulation needs.

    Attributes:
        blueprint: Of the recorded scheduler.
        requests: By attempt, in order of arrival.
        step_time: Fitted to the recorded steps.
        serving: How the recorded time was served.
    """

    blueprint: Blueprint
    requests: Mapping[int, TracedRequest]
    step_time: StepTime
    serving: Serving

    @staticmethod
    def of(recording: Recording) -> "Trace":
        """Replays a recording.

        Raises:
            RecordingError: It is none of this version, does not replay to the same plans, or has a beam search.
        """
        replay, requests, ledger, time = Replay(recording), dict[int, TracedRequest](), Ledger(), StepTime(ALL_STEPS)
        launched, last, busy = deque[tuple[float, StepPlan]](), -math.inf, 0.0
        before = math.inf  # time of the call before that planned a step, while which others came
        for call in replay:
            ledger.take(call.now, call.outputs)
            for event in call.events:
                came = (min(before, call.now) + call.now) / 2
                ledger.came(event, came)
                _trace(requests, event, came)
            if call.plan is not None:
                launched.append((call.now, call.plan))
            if call.outputs is None:
                before = math.inf if call.plan is None else call.now
                continue
            for i, attempt in enumerate(call.outputs.attempts.tolist()):
                place = int(call.outputs.indices[i]), int(call.outputs.positions[i])
                requests[attempt].tokens[place] = int(call.outputs.tokens[i])
            if call.outputs.step_seconds:
                began, plan = launched.popleft()
                seconds, last = call.now - max(began, last), call.now
                time.observe(plan.slices, seconds)
                busy += seconds
        if replay.difference is not None:
            raise RecordingError(f"step {replay.difference.step} differs: another version has decided otherwise")
        first = min((one.at for one in requests.values()), default=0.0)
        serving = _serving(ledger, replay.scheduler, first, max(last, first), busy)
        return Trace(recording.blueprint, requests, time, serving)


def _trace(requests: dict[int, TracedRequest], event: Event, now: float) -> None:
    if isinstance(event, Submit):
        if event.request.beam is not None:
            raise RecordingError("it has a beam search, whose draws depend on the schedule's own results")
        requests[event.attempt] = TracedRequest(now, event)
    elif isinstance(event, Ready) and (one := requests.get(event.attempt)) is not None:
        one.ready = one.ready or now - one.at
    elif isinstance(event, Abort) and (one := requests.get(event.attempt)) is not None:
        one.left.append((now - one.at, event.index))


def _serving(ledger: Ledger, scheduler: Scheduler, first: float, last: float, busy: float) -> Serving:
    stats = scheduler.stats()
    requests = list(ledger.served.values())
    return Serving(requests, last - first, stats.preemptions, stats.prefix_hits, stats.prefix_queries, busy)


class Simulation:
    """Serves the requests of a trace with settings of one's own."""

    def __init__(self, trace: Trace, blueprint: Blueprint | None = None) -> None:
        """blueprint: Of the simulated scheduler; None for the recorded one. Drafts are not simulated."""
        chosen = blueprint or trace.blueprint
        chosen = replace(chosen, settings=replace(chosen.settings, draft_tokens=0))
        hasher = BlockHasher(REPLAY_SECRET, b"", chosen.layout.page_size) if chosen.prefix_cache else None
        self._scheduler = chosen.scheduler(chosen.cache(), hasher)
        self._depth, self._time, self._requests = chosen.settings.depth, trace.step_time, trace.requests
        self._coming = [
            (at, number, place, event)
            for number, one in enumerate(trace.requests.values())
            for place, (at, event) in enumerate(_events(one))
        ]
        heapq.heapify(self._coming)
        self._ready_at: dict[int, float] = {}
        self._ledger = Ledger()

    def run(self) -> Serving:
        """Serves all of them. Returns how."""
        scheduler, flying, busy = self._scheduler, deque[tuple[float, StepPlan, StepResult]](), 0.0
        first = now = self._coming[0][0] if self._coming else 0.0
        while self._coming or scheduler.has_work or scheduler.has_news:
            plan = None
            if len(flying) < self._depth:
                events = list(self._due(now))
                plan = scheduler.schedule(now, events)
                if plan is not None:
                    flying.append((now, plan, self._result(plan)))
            if flying and (plan is None or len(flying) == self._depth):
                began, done, result = flying.popleft()
                seconds = self._time.expected_of(done.slices)
                now, busy = max(began, now) + seconds, busy + seconds
                self._ledger.take(now, scheduler.commit(result, now))
            elif plan is None:
                self._ledger.take(now, scheduler.commit(None, now))
                if not scheduler.has_news:
                    now = self._next_moment(now)
        return _serving(self._ledger, scheduler, first, now, busy)

    def _due(self, now: float) -> Iterator[Event]:
        """Yields the events that have come."""
        while self._coming and self._coming[0][0] <= now:
            at, *_, event = heapq.heappop(self._coming)
            self._ledger.came(event, at)
            if isinstance(event, Submit):
                self._ready_at[event.attempt] = now + self._requests[event.attempt].ready
            yield event
        for attempt in list(self._scheduler.held):
            if self._ready_at[attempt] <= now:
                yield Ready(attempt)

    def _next_moment(self, now: float) -> float:
        """Returns the time at which something comes or becomes ready, where nothing can be computed until then."""
        moments = [self._ready_at[attempt] for attempt in self._scheduler.held]
        moments += [self._coming[0][0]] if self._coming else []
        later = [moment for moment in moments if moment > now]
        return min(later, default=now + 1.0)  # else only a timeout of the queue can come

    def _result(self, plan: StepPlan) -> StepResult:
        rows, drawing = self._scheduler.rows, plan.logits[:, 1].astype(np.intp)
        positions = rows.length[drawing] - rows.prompt[drawing] - 1
        attempts, indices = rows.attempt[drawing].tolist(), rows.index[drawing].tolist()
        tokens = [
            self._requests[attempt].tokens.get((index, position), FILLER)
            for attempt, index, position in zip(attempts, indices, positions.tolist(), strict=True)
        ]
        n = len(tokens)
        none = Logprobs(np.zeros(n, np.float32), np.ones(n, np.int32), *_no_alternatives(n))
        return StepResult(plan.step, np.array(tokens, np.int32), none)


def _events(one: TracedRequest) -> Iterator[tuple[float, Event]]:
    yield one.at, one.submit
    for after, index in one.left:
        yield one.at + after, Abort(one.submit.attempt, index)


def _no_alternatives(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.empty((n, 0), np.int32), np.empty((n, 0), np.float32)
