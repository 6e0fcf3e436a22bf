"""Runs a workload through a scheduler turn by turn, as the engine's loop does, and checks the laws in each turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_manager.allocator import LedgerError
from scheduler.events import End, EndReason, EngineStats, Event, Finish, StepOutputs, Submit
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan
from tests.scheduler.executor import FakeExecutor, Mirror, law
from tests.scheduler.workloads import Arrival, Workload

BROKEN = (AssertionError, LedgerError)  # what a broken law raises: a LawBroken, or the ledger where it sees it first


@dataclass
class Told:
    """What the engine said of one attempt."""

    arrival: Arrival
    tokens: list[int] = field(default_factory=list)
    waited: float | None = None
    end: End | None = None


class Drive:
    """One engine without its thread. A turn takes a second. `trace`: all plans and outputs, as bytes."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.scheduler = Scheduler(workload.settings, workload.queue, workload.layout, workload.pages)
        faulty = {a.attempt: a.fault for a in workload.arrivals if a.fault is not None}
        self.executor = FakeExecutor(workload.layout, workload.pages, workload.settings, faulty)
        self.told: dict[int, Told] = {}
        self.turn = 0
        self.in_flight = 0
        self.stats = EngineStats()
        self.trace: list[bytes] = []
        self._arrivals = {a.attempt: a for a in workload.arrivals}
        self._started: list[int] = []

    def run(self) -> "Drive":
        """To the end, which must come in time."""
        last = max((max(a.turn, a.cancel or 0) for a in self.workload.arrivals), default=0)
        while self.turn <= last or self.scheduler.has_work or self.scheduler.has_news:
            law(self.turn < self.workload.most_turns, f"still at work after {self.turn} turns")
            self.take_turn(self.events_of(self.turn))
        self._check_the_end()
        return self

    def events_of(self, turn: int) -> list[Event]:
        come = [a for a in self.workload.arrivals if a.turn == turn]
        submits: list[Event] = [Submit(a.attempt, a.request, tuple(a.output[: a.emitted])) for a in come]
        return submits + [Finish(a.attempt) for a in self.workload.arrivals if a.cancel == turn]

    def take_turn(self, events: Sequence[Event] = ()) -> StepOutputs | None:
        """As `Engine._turn`; what comes out is checked and kept."""
        for event in events:
            if isinstance(event, Submit):
                law(event.attempt not in self.told, "the workload submits an attempt twice")
                self.told[event.attempt] = Told(self._arrivals[event.attempt])
        now = float(self.turn)
        plan = self.scheduler.schedule(now, events)
        if plan is not None:
            self._launch(plan)
        outputs = None
        full = self.in_flight >= self.workload.depth or self.turn in self.workload.eager
        if self.in_flight and (plan is None or full):
            self.in_flight -= 1
            outputs = self.scheduler.commit(self.executor.collect(), now)
        elif events or self.scheduler.has_news:
            outputs = self.scheduler.commit(None, now)
        else:
            law(plan is not None or not self.scheduler.has_work, "there is work, but none is begun or in flight")
        self.turn += 1
        if outputs is not None:
            self._record(outputs)
        for event in events:
            told = self.told.get(event.attempt)
            answered = not isinstance(event, Finish) or told is None or told.end is not None
            law(answered, f"attempt {event.attempt} is at work after it was told to finish")
        self._check_books()
        return outputs

    def _launch(self, plan: StepPlan) -> None:
        self.trace.append(plan_bytes(plan))
        decoding = {
            row: mirror
            for row, mirror in self.executor.rows.items()
            if row not in plan.leaves and mirror.computed >= mirror.joined and self._has_more(mirror)
        }
        self.executor.launch(plan)
        self.in_flight += 1
        counts = {row: count for row, _, count in plan.slices.tolist()}
        cache, layout = self.scheduler.cache, self.workload.layout
        for row, mirror in decoding.items():
            if row not in counts:
                law(mirror.computed == len(mirror.tables[0]) * layout.page_size, f"the decode of row {row} was delayed")
                law(cache.free < len(layout.groups), f"row {row} lacks a page though {cache.free} are free")
            else:
                law(counts[row] == 1, f"the decode of row {row} has {counts[row]} tokens")
        seeds = {row: mirror.seed for row, mirror in self.executor.rows.items()}
        running = {self.scheduler.rows.row_of(attempt): attempt for attempt in self.scheduler.rows.attempts()}
        law(seeds == running, f"the executor has {seeds}, the scheduler {running}")
        due = sum(layout.pages_for(max(m.joined, m.computed)) for m in self.executor.rows.values())
        law(cache.total - cache.free == due + cache.returning, f"{cache.total - cache.free} pages are held, not {due}")

    def _has_more(self, mirror: Mirror) -> bool:
        request = self._arrivals[mirror.seed].request
        return len(mirror.known) < len(request.prompt) + request.max_tokens

    def _check_books(self) -> None:
        scheduler = self.scheduler
        scheduler.cache.verify()
        running, waiting = scheduler.rows.attempts(), scheduler.queue.attempts()
        law(waiting == sorted(waiting), f"the queue {waiting} is not in order of arrival")
        law(
            max(running, default=0) < min(waiting, default=1 << 30), f"{running} run before {waiting}, who came earlier"
        )
        live = sorted(attempt for attempt, told in self.told.items() if told.end is None)
        law(sorted(running + waiting) == live, f"{running} run and {waiting} wait, {live} have no end")
        lengths = [len(self._arrivals[a].request.prompt) + self._known_outputs(a) for a in waiting]
        law(scheduler.queue.tokens == sum(lengths), f"the queue counts {scheduler.queue.tokens} tokens, not {lengths}")
        most = self.workload.queue.requests + self.workload.settings.max_sequences
        fresh = [attempt for attempt in waiting if self.told[attempt].waited is None]
        law(len(fresh) <= most, f"{len(fresh)} requests wait, more than the bound and the rows together")
        for attempt in waiting:
            told = self.told[attempt]
            patience = told.arrival.request.patience
            limit = self.workload.queue.wait if patience is None else min(patience, self.workload.queue.wait)
            late = told.waited is None and self.turn - 1 - told.arrival.turn >= limit
            law(not late, f"attempt {attempt} waits longer than {limit} s")

    def _known_outputs(self, attempt: int) -> int:
        return self.told[attempt].arrival.emitted + len(self.told[attempt].tokens)

    def _record(self, outputs: StepOutputs) -> None:
        self.trace.append(output_bytes(outputs))
        for start in outputs.starts:
            told = self.told[start.attempt]
            law(told.waited is None, f"attempt {start.attempt} started twice")
            law(told.end is None, f"attempt {start.attempt} started after its end")
            told.waited = start.waited
            self._started.append(start.attempt)
        law(self._started == sorted(self._started), f"{self._started} started in another order than they came")
        positions = outputs.positions.tolist()
        for i, (attempt, token) in enumerate(zip(outputs.attempts.tolist(), outputs.tokens.tolist(), strict=True)):
            told = self.told[attempt]
            law(told.end is None, f"attempt {attempt} has a token after its end")
            law(told.waited is not None, f"attempt {attempt} has a token before its start")
            law(positions[i] == self._known_outputs(attempt), f"attempt {attempt} has a gap or a duplicate")
            law(outputs.logprobs.chosen[i] == -token, "a token has another's logprob")
            law(outputs.logprobs.top_ids[i].tolist() == [token, token + 1], "a token has another's alternatives")
            told.tokens.append(token)
        for end in outputs.ends:
            told = self.told[end.attempt]
            law(told.end is None, f"attempt {end.attempt} ended twice")
            told.end = end
        self.stats = outputs.stats

    def _check_the_end(self) -> None:
        cache, stats = self.scheduler.cache, self.stats
        law(cache.free == cache.total and not cache.returning, f"{cache.total - cache.free} pages are held by nobody")
        law(self.scheduler.queue.tokens == 0, "an empty queue counts tokens")
        law((stats.running, stats.waiting, stats.pages_used) == (0, 0, 0), f"idle, but the gauges say {stats}")
        law(stats.computed_tokens == self.executor.computed_tokens, "computed tokens are miscounted")
        for told in self.told.values():
            check_outcome(told, self.workload)


def check_outcome(told: Told, workload: Workload) -> None:
    """The end of an attempt is one that the workload gives a reason for, and its tokens are those it has alone."""
    arrival, end = told.arrival, told.end
    request, whole = arrival.request, arrival.output
    law(end is not None, f"attempt {arrival.attempt} has no end")
    assert end is not None
    name = f"attempt {arrival.attempt}, which ended with {end.reason.value}"
    first_missing = arrival.emitted
    faults = arrival.fault is not None and arrival.fault <= len(request.prompt) + len(whole) - 2
    if faults and arrival.fault is not None:
        whole = whole[: max(first_missing, arrival.fault + 1 - len(request.prompt))]
    rest = whole[first_missing:]
    law(told.tokens == rest[: len(told.tokens)], f"{name}, has {told.tokens}, alone {rest}")
    if end.reason in (EndReason.QUEUE_FULL, EndReason.QUEUE_TIMEOUT):
        bounded = workload.queue.wait < 1e9 or workload.queue.requests < len(workload.arrivals)
        law(bounded or request.patience is not None, f"{name}, was refused by a queue without bounds")
        law(told.waited is None and not told.tokens, f"{name}, had started")
        law(1.0 <= end.retry_after <= 30.0, f"{name}, is told to retry after {end.retry_after}")
        law(end.message, f"{name}, is not told why")
        return
    if end.reason is EndReason.FINISHED:
        law(arrival.cancel is not None, f"{name}, was not cancelled")
        return
    law(told.tokens == rest, f"{name}, has {told.tokens}, alone {rest}")
    if faults:
        law(end.reason is EndReason.FAULT, f"{name}, has a fault")
        law(end.message, f"{name}, is not told why")
        return
    stopped = whole[-1] in request.stop_ids
    law(end.reason is (EndReason.STOP if stopped else EndReason.LENGTH), f"{name}, ended for another reason")
    law(end.stop_token_id == (whole[-1] if stopped else None), f"{name}, names the stop token {end.stop_token_id}")


def plan_bytes(plan: StepPlan) -> bytes:
    """All of a plan, types and shapes included."""
    joins = [
        (j.row, j.tokens.dtype.str, j.tokens.tobytes(), j.prompt_count, repr(j.controls), j.index) for j in plan.joins
    ]
    arrays = (plan.leaves, plan.grown, plan.slices, plan.logits)
    return repr((plan.step, joins, [(a.dtype.str, a.shape, a.tobytes()) for a in arrays])).encode()


def output_bytes(outputs: StepOutputs) -> bytes:
    """All of a step's outputs, types and shapes included."""
    probs = outputs.logprobs
    arrays = (
        outputs.attempts,
        outputs.positions,
        outputs.tokens,
        probs.chosen,
        probs.rank,
        probs.top_ids,
        probs.top,
    )
    rest = (outputs.starts, outputs.ends, outputs.stats, outputs.step_seconds)
    return repr(([(a.dtype.str, a.shape, a.tobytes()) for a in arrays], rest)).encode()
