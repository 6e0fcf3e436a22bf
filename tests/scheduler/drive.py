"""Runs a workload through a scheduler turn by turn, as the engine's loop does, and checks the laws in each turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_manager.allocator import LedgerError
from cache_manager.ledger import verify
from cache_manager.manager import CLOSED
from scheduler.events import Ask, End, EndReason, EngineStats, Event, Finish, Question, StepOutputs, Submit
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan
from tests.scheduler.executor import FakeExecutor, law
from tests.scheduler.mirror import Mirror
from tests.scheduler.oracle import Oracle
from tests.scheduler.room import Before, Room
from tests.scheduler.workloads import Arrival, Workload

BROKEN = (AssertionError, LedgerError)  # what a broken law raises: a LawBroken, or the ledger where it sees it first


@dataclass
class Told:
    """What the engine said of one attempt."""

    arrival: Arrival
    tokens: list[int] = field(default_factory=list)
    waited: float | None = None
    cached: int = 0
    end: End | None = None

    @property
    def known(self) -> list[int]:
        """All its tokens as far as they were told."""
        return self.arrival.request.prompt.tolist() + self.arrival.output[: self.arrival.emitted] + self.tokens


class Drive:
    """One engine without its thread. A turn takes a second. trace: all plans and outputs, as bytes. overtaken: how
    often a request waited while a later one started.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        cache = workload.cache
        self.scheduler = Scheduler(workload.settings, workload.queue, cache, workload.namer)
        faulty = {a.attempt: a.fault for a in workload.arrivals if a.fault is not None}
        self.executor = FakeExecutor(workload.layout, workload.pages, workload.settings, faulty)
        self.told: dict[int, Told] = {}
        self.turn = 0
        self.in_flight = 0
        self.stats = EngineStats()
        self.trace: list[bytes] = []
        self._arrivals = {a.attempt: a for a in workload.arrivals}
        scopes = {a.attempt: a.request.scope for a in workload.arrivals}
        self.oracle = Oracle(self.scheduler, self.executor, scopes)
        self.room = Room(cache, workload.settings, workload.prefix_cache)
        self._lengths_at_start = self._forgotten = self.overtaken = 0

    def run(self) -> "Drive":
        """To the end, which must come in time."""
        last = max((max(a.turn, a.cancel or 0) for a in self.workload.arrivals), default=0)
        last = max(last, *self.workload.resets, 0)
        while self.turn <= last or self.scheduler.has_work or self.scheduler.has_news:
            law(self.turn < self.workload.most_turns, f"still at work after {self.turn} turns")
            self.take_turn(self.events_of(self.turn))
        self._check_the_end()
        return self

    def events_of(self, turn: int) -> list[Event]:
        come = [a for a in self.workload.arrivals if a.turn == turn]
        submits: list[Event] = [Submit(a.attempt, a.request, (tuple(a.output[: a.emitted]),)) for a in come]
        asks = [Ask(turn, Question.RESET_PREFIX_CACHE)] if turn in self.workload.resets else []
        return submits + [Finish(a.attempt) for a in self.workload.arrivals if a.cancel == turn] + asks

    def take_turn(self, events: Sequence[Event] = ()) -> StepOutputs | None:
        """As `Engine._turn`; what comes out is checked and kept."""
        for event in events:
            if isinstance(event, Submit):
                law(event.attempt not in self.told, "the workload submits an attempt twice")
                self.told[event.attempt] = Told(self._arrivals[event.attempt])
        now = float(self.turn)
        before = set(self.scheduler.rows.attempts())
        going_on = {row: self._before(mirror) for row, mirror in self.executor.rows.items()}
        plan = self.scheduler.schedule(now, events)
        if plan is not None:
            going_on = {row: one for row, one in going_on.items() if row not in plan.leaves}
            self._launch(plan, going_on)
        victims = before & set(self.scheduler.queue.attempts())
        kept = before & set(self.scheduler.rows.attempts())
        law(max(kept, default=0) < min(victims, default=1 << 30), f"{victims} were preempted, {kept} were not")
        if not victims:
            self._check_nobody_is_held_up(plan, going_on)
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
            if isinstance(event, Finish) and event.attempt in self.told:
                ended = self.told[event.attempt].end is not None
                law(ended, f"attempt {event.attempt} is at work after it was told to finish")
        self._check_books()
        return outputs

    def _before(self, mirror: Mirror) -> Before:
        request, length = self._arrivals[mirror.seed].request, len(mirror.known)
        need = min(length, len(request.prompt) + request.max_tokens - 1) - mirror.computed
        return Before(mirror, mirror.computed, length, need)

    def _launch(self, plan: StepPlan, before: dict[int, Before]) -> None:
        """before: rows that go on, as they were."""
        self.trace.append(plan_bytes(plan))
        self.executor.launch(plan)
        self.in_flight += 1
        self.oracle.step_launched(plan)
        self._check_admission(plan, {one.mirror for one in before.values()})
        self._check_delays(plan, before)
        rows, cache = self.executor.rows, self.scheduler.cache
        seeds = {row: mirror.seed for row, mirror in rows.items()}
        running = {self.scheduler.rows.row_of(attempt): attempt for attempt in self.scheduler.rows.attempts()}
        law(seeds == running, f"the executor has {seeds}, the scheduler {running}")
        scheduled = set(plan.slices[:, 0].tolist())
        for row, mirror in rows.items():
            self.room.check_ends(row, mirror, before.get(row), row in scheduled)
        self.room.check_newcomers(plan, before, rows)
        held = set().union(*(self.room.held(row, mirror) for row, mirror in rows.items()))
        held |= {page for parts in cache.pool.in_flight.values() for pages in parts for page in pages.tolist()}
        taken = cache.pool.total - cache.pool.free
        law(taken == len(held), f"{taken} pages are held, not {len(held)}")

    def _check_delays(self, plan: StepPlan, before: dict[int, Before]) -> None:
        """Who sits out lacks pages, or the budget is spent on others; a decode is in every step."""
        counts = {row: count for row, _, count in plan.slices.tolist()}
        left = self.workload.settings.max_batched_tokens - sum(counts.values())
        free = self.scheduler.cache.pool.free
        for row, one in before.items():
            if one.need <= 0:
                continue
            name = "decode" if one.computed >= one.mirror.joined else "prefill"
            if row in counts:
                law(counts[row] == 1 or name == "prefill", f"the decode of row {row} has {counts[row]} tokens")
            elif left or name == "decode":
                lacking = self.room.lacking(one)
                law(lacking, f"the {name} of row {row} was delayed")
                law(free < lacking, f"row {row} lacks {lacking} pages though {free} are free")

    def _check_admission(self, plan: StepPlan, before: set[Mirror]) -> None:
        """Who joins goes on from all that is published, and passes over nobody but who waits for a page."""
        size, on = self.workload.layout.page_size, self.workload.prefix_cache
        running = {mirror.seed for mirror in before}
        joined = [self.executor.rows[join.row] for join in plan.joins]
        for mirror in joined:
            known = mirror.known[: mirror.joined]
            due = self.oracle.cached(mirror.seed, known).count * size
            law(mirror.cached == due, f"attempt {mirror.seed} joins with {mirror.cached} cached tokens, not {due}")
            computing = self.oracle.computing(mirror.seed, known, at_join=True) if on else []
            earlier = [other for other in computing if other in running or other < mirror.seed]
            law(not earlier, f"attempt {mirror.seed} computes what {earlier} compute")
        latest = max((mirror.seed for mirror in joined), default=0)
        for attempt in self.scheduler.queue.attempts():
            if attempt < latest:
                computing = self.oracle.computing(attempt, self.told[attempt].known) if on else []
                waits = any(other in running or other < latest for other in computing)
                law(waits, f"{latest} starts before {attempt}, who waits for no page")
                self.overtaken += 1

    def _check_nobody_is_held_up(self, plan: StepPlan | None, before: dict[int, Before]) -> None:
        """Rows, budget or pages are lacking for the first in line that waits for nobody's page."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        left = self.workload.settings.max_batched_tokens - (0 if plan is None else int(plan.slices[:, 2].sum()))
        if not left or scheduler.rows.used == scheduler.rows.size:
            return
        lengths = {
            row: (mirror, before[row].length if row in before else mirror.joined)
            for row, mirror in self._running().items()
        }
        for (attempt, _), sequence in scheduler.queue._waiting.items():
            if scheduler._match(sequence).awaited is not None:
                continue
            known = self.told[attempt].known
            if self.workload.prefix_cache and self.oracle.computing(attempt, known):
                return  # it may wait for a page after the first one that it lacks
            needed = self.room.needed(known, self.oracle.cached(attempt, known))
            lacking = cache.pool.free - self.room.spare(lengths) < needed
            law(lacking, f"attempt {attempt} is held up though there is room for it")
            return

    def _running(self) -> dict[int, Mirror]:
        """Those of the executor's rows whose sequences have not left, of which it is told with the next plan."""
        rows = self.scheduler.rows
        return {row: mirror for row, mirror in self.executor.rows.items() if rows.row_of(mirror.seed) == row}

    def _check_books(self) -> None:
        scheduler = self.scheduler
        verify(scheduler.cache)
        disturbed = self.workload.resets or any(a.fault is not None for a in self.workload.arrivals)
        for row, mirror in self._running().items():
            self.room.check_behind_windows(row, mirror)
            silent = self.workload.prefix_cache and scheduler.cache.named[row] == CLOSED
            law(not silent or disturbed, f"attempt {mirror.seed} publishes no more")
        running, waiting = scheduler.rows.attempts(), scheduler.queue.attempts()
        law(waiting == sorted(waiting), f"the queue {waiting} is not in order of arrival")
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
            told.waited, told.cached = start.waited, start.cached
            self._check_start(told)
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
            if end.reason is EndReason.FAULT:
                self.executor.distrust(end.attempt)
        for answer in outputs.answers:
            self._forgotten += answer.forgotten
        self.stats = outputs.stats
        self._check_stats()

    def _check_start(self, told: Told) -> None:
        """The cached tokens that are told are those of the prompt that the executor did not compute."""
        arrival = told.arrival
        found, prompt = self.executor.found[arrival.attempt][0], len(arrival.request.prompt)
        name = f"attempt {arrival.attempt} starts with {told.cached} cached tokens"
        law(told.cached == min(found, prompt), f"{name}, the executor has {found}")
        law(told.cached < prompt or arrival.emitted, f"{name}, all of its prompt")
        self._lengths_at_start += prompt + arrival.emitted

    def _check_stats(self) -> None:
        """Gauges and counts against the executor's; in `ledger.verify` the manager's own are checked."""
        stats, cache, executor = self.stats, self.scheduler.cache, self.executor
        size = self.workload.layout.page_size
        rows = self._running().values()
        unused = sum(len(table.told) * size - mirror.computed for mirror in rows for table in mirror.tables)
        law(stats.slots_unused == unused, f"{stats.slots_unused} slots are unused, not {unused}")
        law(stats.pages_used + stats.pages_cached + cache.allocator.free == stats.pages_total, f"pages add up: {stats}")
        law(stats.pages_shared <= stats.pages_used, f"more pages are shared than held: {stats}")
        law(sum(stats.lifetimes) == stats.evicted_capacity, f"lifetimes of all that was evicted: {stats}")
        law(stats.lifetime_seconds <= sum(stats.lifetimes) * (self.turn + 1), f"older than the engine: {stats}")
        law(stats.imbalances == 0, f"the ledger found {stats.imbalances} wrong pages")
        law(stats.evicted_reset == self._forgotten, f"resets took {self._forgotten} pages: {stats}")
        known = self._lengths_at_start if self.workload.prefix_cache else 0
        law(stats.prefix_queries == known, f"{stats.prefix_queries} tokens were looked up, not {known}")
        hits = sum(found[0] for attempt, found in executor.found.items() if self.told[attempt].waited is not None)
        law(stats.prefix_hits == hits, f"{stats.prefix_hits} tokens were found, not {hits}")

    def _check_the_end(self) -> None:
        cache, stats = self.scheduler.cache, self.stats
        pool = cache.pool
        law(pool.free == pool.total and not pool.returning, f"{pool.total - pool.free} pages are held by nobody")
        law(not cache.allocator.counts.any() and not cache.allocator.shared, "pages are counted though nobody is there")
        law(not cache.frontiers.row_of, "pages are being computed though nobody is there")
        law(self.workload.prefix_cache or not stats.pages_cached, "pages are cached without a cache")
        law(self.scheduler.queue.tokens == 0, "an empty queue counts tokens")
        law((stats.running, stats.waiting, stats.pages_used) == (0, 0, 0), f"idle, but the gauges say {stats}")
        law(stats.computed_tokens == self.executor.computed_tokens, "computed tokens are miscounted")
        again = self.executor.recomputed
        law(stats.recomputed_tokens == again, f"{again} tokens were computed again, not {stats.recomputed_tokens}")
        for told in self.told.values():
            check_outcome(told, self.workload, max(self.executor.found.get(told.arrival.attempt, [0])))


def check_outcome(told: Told, workload: Workload, found: int = 0) -> None:
    """The end of an attempt is one that the workload gives a reason for, and its tokens are those it has alone.

    found: the most tokens that it joined with; a fault that it would meet there another one did not have.
    """
    arrival, end = told.arrival, told.end
    request, whole = arrival.request, arrival.output
    law(end is not None, f"attempt {arrival.attempt} has no end")
    assert end is not None
    name = f"attempt {arrival.attempt}, which ended with {end.reason.value}"
    first_missing = arrival.emitted
    stopped = bool(whole) and whole[-1] in request.stop_ids
    stuck = len(whole) < request.max_tokens and not stopped
    computed = len(request.prompt) + len(whole) - (not stuck)  # the last token is computed where another was to follow
    faults = arrival.fault is not None and arrival.fault < computed
    if faults and arrival.fault is not None and end.reason is not EndReason.FAULT:
        faults = arrival.fault >= found
    if faults and arrival.fault is not None:
        met = arrival.fault + 1 - len(request.prompt)
        if found > arrival.fault:  # another had computed that position; when this one lost its pages, it met the fault
            met = first_missing + len(told.tokens)
        whole = whole[: max(first_missing, met)]
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
    if stuck:
        law(end.reason is EndReason.STUCK, f"{name}, had nothing left to draw")
        return
    law(end.reason is (EndReason.STOP if stopped else EndReason.LENGTH), f"{name}, ended for another reason")
    law(end.stop_token_id == (whole[-1] if stopped else None), f"{name}, names the stop token {end.stop_token_id}")


def plan_bytes(plan: StepPlan) -> bytes:
    """All of a plan, types and shapes included."""
    joins = [
        (j.row, j.tokens.dtype.str, j.tokens.tobytes(), j.prompt_count, repr(j.controls), j.index) for j in plan.joins
    ]
    arrays = (plan.leaves, plan.grown, plan.copies, plan.freed, plan.slices, plan.logits, plan.given)
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
