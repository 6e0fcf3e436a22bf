"""Runs a workload through a scheduler turn by turn, as the engine's loop does, and checks the laws in each turn."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from cache_manager.allocator import LedgerError
from cache_manager.ledger import verify
from cache_manager.publishing import CLOSED
from scheduler.events import Abort, EndReason, EngineStats, Event, StepOutputs, Submit
from scheduler.policy import SchedulingPolicy
from scheduler.rows import Sequence as Waiting
from scheduler.scheduler import Scheduler
from scheduler.step import Join, StepPlan
from tests.scheduler.executor import FakeExecutor, LawBroken, law
from tests.scheduler.oracle import Oracle
from tests.scheduler.outcome import Outcome, check_outcome
from tests.scheduler.plan_checker import PlanChecker
from tests.scheduler.preemptions import Victims
from tests.scheduler.room import Before, Room
from tests.scheduler.trace import output_bytes, plan_bytes
from tests.scheduler.workloads import Workload

BROKEN = (AssertionError, LedgerError)  # what a broken law raises: a LawBroken, or the ledger where it sees it first


Result = TypeVar("Result")
Key = tuple[int, int]  # of a sequence: attempt, index


class SchedulerDriver:
    """One engine without its thread. A turn takes a second. trace: all plans and outputs, as bytes. overtaken: how
    often a request waited while a later one started. parked: how often a hypothesis was found to wait without a row.
    lockstep: plans of rows in lockstep. grown_in_lockstep: pages that these gave to rows.
    """

    def __init__(self, workload: Workload, policy: SchedulingPolicy | None = None) -> None:
        self.workload = workload
        cache = workload.cache
        self.scheduler = Scheduler(workload.settings, workload.queue, cache, workload.hasher, policy=policy)
        faulty = {a.attempt: a.fault for a in workload.arrivals if a.fault is not None}
        self.executor = FakeExecutor(workload.layout, workload.pages, workload.settings, faulty)
        self.told: dict[int, Outcome] = {}
        self.turn = 0
        self.in_flight = 0
        self.stats = EngineStats()
        self.trace: list[bytes] = []
        self._arrivals = {a.attempt: a for a in workload.arrivals}
        scopes = {a.attempt: a.request.scope for a in workload.arrivals}
        self._idle_before = set[Key]()
        self._victims = Victims(workload.settings.max_preemptions)
        self.oracle = Oracle(self.scheduler, self.executor, scopes)
        self.room = Room(cache, workload.settings, workload.prefix_cache)
        self._lengths_at_start = self._forgotten = self.overtaken = self.suspended = 0
        self.lockstep = self.grown_in_lockstep = 0
        self._passed: dict[Key, int] = {}  # turn in which one starts before this sequence for the first time

    def run(self) -> "SchedulerDriver":
        """To the end, which must come in time."""
        while self.turn <= self.workload.last_turn or self.scheduler.has_work or self.scheduler.has_news:
            law(self.turn < self.workload.most_turns, f"still at work after {self.turn} turns")
            self.next_turn()
        self._check_the_end()
        return self

    def next_turn(self) -> StepOutputs | None:
        """Takes a turn with the workload's events."""
        return self.take_turn(self.workload.events(self.turn))

    def take_turn(self, events: Sequence[Event] = ()) -> StepOutputs | None:
        """As `Engine._turn`; what comes out is checked and kept.

        With `Workload.amid` some events come once a step is launched, as in `Engine.send`.
        """
        for event in events:
            if isinstance(event, Submit):
                law(event.attempt not in self.told, "the workload submits an attempt twice")
                self.told[event.attempt] = Outcome(self._arrivals[event.attempt])
        now = float(self.turn)
        before, preemptions = self._rows(), self.scheduler.stats().preemptions
        self._victims.before_turn(self.scheduler)
        idle = self._idle_before = self._idle()
        going_on = {row: self._before(row, mirror) for row, mirror in self.executor.rows.items()}
        in_lockstep = self.scheduler.lockstep.steps
        late: Sequence[Event] = ()
        if self.workload.amid and self.turn % 2 and self.in_flight == self.workload.depth - 1:
            events, late = _in_two(events)
        may_join = self._may_join(events)
        plan = _unbroken(lambda: self.scheduler.schedule(now, events))
        if plan is None and late:
            may_join |= self._may_join(late)
            plan = _unbroken(lambda: self.scheduler.schedule(now, late))
            events, late = [*events, *late], ()
        if plan is not None and self.scheduler.lockstep.steps > in_lockstep:
            self.lockstep += 1
            self.grown_in_lockstep += len(plan.grown)
        if plan is not None:
            going_on = {row: one for row, one in going_on.items() if row not in plan.leaves}
            self._launch(plan, going_on, [join.row for join in plan.joins if self._key(join) in may_join])
        victims = before & self._waiting()
        kept = before & self._rows()
        self._victims.check(victims, kept)
        law(not victims or not idle & kept, f"{victims} were preempted, {idle & kept} wait for others and were not")
        self._check_rows_for_siblings()
        if preemptions == self.scheduler.stats().preemptions:
            self._check_nobody_is_held_up(plan, going_on)
        if late:
            law(_unbroken(lambda: self.scheduler.schedule(now, late)) is None, "one step too many is planned")
            events = [*events, *late]
        outputs = None
        if self.workload.collects(self.turn, plan, self.in_flight):
            self.in_flight -= 1
            outputs = _unbroken(lambda: self.scheduler.commit(self.executor.collect(), now))
        elif events or self.scheduler.has_news:
            outputs = _unbroken(lambda: self.scheduler.commit(None, now))
        else:
            at_work = plan is not None or not self.scheduler.has_work or self.scheduler.is_held
            law(at_work, "there is work, but none is begun or in flight")
        self.turn += 1
        if outputs is not None:
            self._record(outputs)
        for event in events:
            if isinstance(event, Abort) and event.attempt in self.told:
                told = self.told[event.attempt]
                left = told.live if event.index is None or told.arrival.request.beam else {event.index} & set(told.live)
                law(not left, f"sequences {left} of attempt {event.attempt} are at work after it was told to finish")
        self._check_books()
        return outputs

    def _may_join(self, events: Sequence[Event]) -> set[Key]:
        """Sequences that wait, or will once these events are in: where the one is dropped from whose prompt others are
        to go on, the first of those takes its place.
        """
        keys = self._waiting()
        dropped = {(event.attempt, event.index) for event in events if isinstance(event, Abort)}
        for event in events:
            told = self.told.get(event.attempt) if isinstance(event, Submit | Abort) else None
            if told is None:
                continue
            if isinstance(event, Submit):
                keys |= {(event.attempt, index) for index in told.arrival.heads}
            fresh = [(event.attempt, index) for index in told.live if not told.output(index)]
            if fresh and fresh[0] in dropped:
                keys |= set([key for key in fresh if key not in dropped][:1])
        return keys

    @staticmethod
    def _key(join: Join) -> Key:
        return join.controls.seed, join.index

    def _rows(self) -> set[Key]:
        """Sequences that have rows."""
        return set(self._keys().values())

    def _keys(self) -> dict[int, Key]:
        """Sequences by their rows."""
        rows = self.scheduler.rows
        active = rows.active()
        each = zip(active.tolist(), rows.attempt[active].tolist(), rows.index[active].tolist(), strict=True)
        return {row: (attempt, index) for row, attempt, index in each}

    def _waiting(self) -> set[Key]:
        """Sequences that are queued."""
        return {sequence.key for sequence in self.scheduler.queue.in_order()}

    def _idle(self) -> set[Key]:
        """Hypotheses that wait in their rows for others of their searches."""
        rows = self.scheduler.rows
        return {(int(rows.attempt[row]), int(rows.index[row])) for row in self.scheduler.running.idle()}

    def _before(self, row: int, mirror: PlanChecker) -> Before:
        request = self._arrivals[mirror.seed].request
        length = len(mirror.known) - (mirror.waits and row not in self.scheduler.running.forced)
        need = min(length, len(request.prompt) + request.max_tokens - 1) - mirror.computed
        return Before(mirror, mirror.computed, length, need)

    def _launch(self, plan: StepPlan, before: dict[int, Before], newcomers: list[int]) -> None:
        """before: rows that go on, as they were. newcomers: rows of those that come from the queue."""
        self.trace.append(plan_bytes(plan))
        self.executor.launch(plan)
        self.in_flight += 1
        self.oracle.step_launched(plan)
        self._check_admission(newcomers, {one.mirror for one in before.values()})
        self._check_delays(plan, before)
        rows, cache = self.executor.rows, self.scheduler.cache
        keys = {row: mirror.key for row, mirror in rows.items()}
        running = self._keys()
        law(keys == running, f"the executor has {keys}, the scheduler {running}")
        scheduled = set(plan.slices[:, 0].tolist())
        for row, mirror in rows.items():
            self.room.check_ends(row, mirror, before.get(row), row in scheduled)
        last = keys[newcomers[-1]][0] if newcomers else None
        self.room.check_newcomers(newcomers, before, rows, self._siblings(but=last))
        held = set().union(*(self.room.held(row, mirror) for row, mirror in rows.items()))
        held |= {page for parts in cache.pool.in_flight.values() for pages in parts for page in pages.tolist()}
        taken = cache.pool.total - cache.pool.free
        law(taken == len(held), f"{taken} pages are held, not {len(held)}")

    def _siblings(self, but: int | None = None) -> int:
        """Sequences that are to go on from the prompts of those that run: counted anew from what is still to come. but:
        without those of an attempt.
        """
        here = self._rows() | self._waiting()
        ended = {(end.attempt, end.index) for end in self.scheduler.pending_ends}
        total = 0
        for attempt in {attempt for attempt, _ in self._rows()} - {but}:
            told, search = self.told[attempt], self.scheduler.running.beams.get(attempt)
            if search is not None:
                total += (search.width - 1) * (search.live == {0: None})
            else:
                fresh = {(attempt, i) for i in told.live if not told.output(i)} - ended
                total += len(fresh - here) * bool(fresh & self._rows())
        return total

    def _check_rows_for_siblings(self) -> None:
        rows, due = self.scheduler.rows, self._siblings()
        law(rows.size - rows.used >= due, f"{rows.size - rows.used} rows are left for {due} sequences to come")
        law(rows.free == rows.size - rows.used - due, f"{rows.free} rows are said to be free, with {due} to be kept")

    def _check_delays(self, plan: StepPlan, before: dict[int, Before]) -> None:
        """Checks that a row that sits out lacks pages or budget; a decode is in every step."""
        counts = {row: count for row, _, count in plan.slices.tolist()}
        left = self.workload.settings.step_tokens - sum(counts.values())
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
                # A row that gave way to one in the queue, when this row had found no page, has left pages.
                parked = self._idle_before - self._idle()
                law(parked or free < lacking, f"row {row} lacks {lacking} pages though {free} are free")

    def _check_admission(self, newcomers: list[int], before: set[PlanChecker]) -> None:
        """Checks that newcomers go on from all that is published, and pass over none but those that may be passed.

        These wait for a page, or have been passed for less than the time for it.
        """
        size, on = self.workload.layout.page_size, self.workload.prefix_cache
        running = {mirror.key for mirror in before}
        joined = [self.executor.rows[row] for row in newcomers]
        for mirror in joined:
            known = mirror.known[: mirror.joined]
            due = self.oracle.cached(mirror.seed, known).count * size
            law(mirror.cached == due, f"sequence {mirror.key} joins with {mirror.cached} cached tokens, not {due}")
            wrong = mirror.had & self.executor.distrusted
            law(not wrong, f"sequence {mirror.key} joins on pages {wrong} of a row that faulted")
            computing = self.oracle.computing(mirror.key, known, at_join=True) if on else []
            earlier = [other for other in computing if other in running or other < mirror.key]
            law(not earlier, f"sequence {mirror.key} computes what {earlier} compute")
        latest = max((mirror.key for mirror in joined), default=(0, 0))
        for sequence in self.scheduler.queue.in_order():
            key = sequence.key
            if key < latest and key[0] not in self.scheduler.held:
                computing = self.oracle.computing(key, self._tokens_of(sequence)) if on else []
                waits = any(other in running or other < latest for other in computing)
                starts = any(mirror.key[0] == key[0] for mirror in joined)
                law(
                    waits or self._may_be_passed(sequence, starts),
                    f"{latest} starts before {key}, who waits for no page",
                )
                self.overtaken += waits

    def _may_be_passed(self, sequence: Waiting, starts: bool) -> bool:
        """Whether those that start before a sequence have done so for less than the time in which they may.

        starts: another sequence of its request starts in this turn, since when it counts as served, as a preempted one.
        """
        since = self._passed.setdefault(sequence.key, self.turn)
        return (starts or not sequence.preempted) and self.turn - since < self.workload.settings.backfill_time

    def _tokens_of(self, sequence: Waiting) -> list[int]:
        """Returns the tokens of a sequence that waits; those of a hypothesis were not told."""
        if sequence.request.beam is not None:
            return sequence.tokens().tolist()
        return self.told[sequence.attempt].known(sequence.index)

    def _check_nobody_is_held_up(self, plan: StepPlan | None, before: dict[int, Before]) -> None:
        """Rows, budget or pages are lacking for the first in line that waits for no other's page."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        left = self.workload.settings.step_tokens - (0 if plan is None else int(plan.slices[:, 2].sum()))
        if not left:
            return
        lengths = {
            row: (mirror, before[row].length if row in before else mirror.joined)
            for row, mirror in self._running().items()
        }
        for sequence in scheduler.queue.in_order():
            key = sequence.key
            if key[0] in self.scheduler.held:
                continue
            parkable = [other for other in self._idle() if other >= (key[0], 0)]
            if scheduler.rows.free <= len(sequence.siblings):
                law(not parkable, f"sequence {key} lacks rows while {parkable} wait in theirs")
                return
            known = self._tokens_of(sequence)
            if self._awaits_a_page(sequence):
                continue
            if self.workload.prefix_cache and self.oracle.computing(key, known):
                return  # it may wait for a page after the first one that it lacks
            needed = self.room.needed(known, self.oracle.cached(key[0], known))
            lacking = cache.pool.free - self.room.spare(lengths, siblings=self._siblings()) < needed
            law(lacking, f"sequence {key} is held up though there is room for it")
            law(not parkable, f"sequence {key} lacks pages while {parkable} wait in their rows")
            return

    def _awaits_a_page(self, sequence: Waiting) -> bool:
        """Whether a running row computes the next page of the longest prefix that is cached of it."""
        hasher = self.workload.hasher
        if hasher is None:
            return False
        chain = hasher.chain(sequence.request.scope)
        chain.extend(sequence.tokens())
        match = self.scheduler.cache.lookup.match(chain, sequence.length - 1, sequence.transferred)
        return match.awaited is not None

    def _running(self) -> dict[int, PlanChecker]:
        """The executor's rows whose sequences have not left. The next plan reports those that have."""
        rows = self.scheduler.rows
        return {row: mirror for row, mirror in self.executor.rows.items() if rows.row_of(*mirror.key) == row}

    def _check_books(self) -> None:
        scheduler = self.scheduler
        verify(scheduler.cache)
        disturbed = self.workload.resets or any(a.fault is not None for a in self.workload.arrivals)
        for row, mirror in self._running().items():
            self.room.check_behind_windows(row, mirror)
            silent = self.workload.prefix_cache and scheduler.cache.published.count[row] == CLOSED
            law(not silent or disturbed, f"sequence {mirror.key} publishes no more")
        self._check_places()
        waiting = scheduler.queue.in_order()
        lengths = [len(self._tokens_of(sequence)) for sequence in waiting]
        law(scheduler.queue.tokens == sum(lengths), f"the queue counts {scheduler.queue.tokens} tokens, not {lengths}")
        most = self.workload.queue.requests + self.workload.settings.max_sequences
        fresh = {one.attempt for one in waiting if self.told[one.attempt].age is None}
        law(len(fresh) <= most, f"{len(fresh)} requests wait, more than the bound and the rows together")
        for attempt in fresh:
            told = self.told[attempt]
            queue_timeout = told.arrival.request.queue_timeout
            limit = self.workload.queue.wait if queue_timeout is None else min(queue_timeout, self.workload.queue.wait)
            late = self.turn - 1 - told.arrival.turn >= limit
            law(not late, f"attempt {attempt} waits longer than {limit} s")

    def _check_places(self) -> None:
        """Each sequence that has not ended is in one place, and no other sequence is in any.

        The places are a row, the queue, and the siblings that go on from a row's prompt. A hypothesis that waits may
        also be suspended.
        """
        scheduler = self.scheduler
        running, beams = self._rows(), scheduler.running.beams
        waiting = [sequence.key for sequence in scheduler.queue.in_order()]
        law(waiting == sorted(waiting), f"the queue {waiting} is not in order of arrival")
        law(running.isdisjoint(waiting), f"{running & set(waiting)} run and wait")
        live = {attempt for attempt, told in self.told.items() if told.live}
        law(set(scheduler.live_attempts()) == live, f"{scheduler.live_attempts()} are at work, {live} have no end")
        searches = {attempt for attempt in live if self._arrivals[attempt].request.beam is not None}
        law(set(beams) == searches, f"there are searches of {set(beams)}, not of {searches}")
        parents = [scheduler.rows.sequence(row) for row in scheduler.rows.active().tolist()]
        parents += scheduler.queue.in_order()
        come = [(one.attempt, index) for one in parents for index in one.siblings if one.attempt not in searches]
        due = sorted((attempt, index) for attempt in live - searches for index in self.told[attempt].live)
        here = sorted(key for key in [*running, *waiting, *come] if key[0] not in searches)
        law(here == due, f"{running} run, {waiting} wait and {come} are to come, {due} have no end")
        for attempt, search in beams.items():
            parked = [(attempt, slot) for slot in search.suspended]
            self.suspended += len(parked)
            law(
                all(search.has_offer(slot) for slot in search.suspended),
                f"{parked} are parked and have offered nothing",
            )
            here = sorted(key for key in [*running, *waiting, *parked] if key[0] == attempt)
            due = sorted((attempt, slot) for slot in search.live)
            law(here == due, f"{running} run, {waiting} wait and {parked} are parked, {due} are live")

    def _record(self, outputs: StepOutputs) -> None:
        self.trace.append(output_bytes(outputs))
        for start in outputs.starts:
            told = self.told[start.attempt]
            law(told.age is None, f"attempt {start.attempt} started twice")
            law(told.end is None, f"attempt {start.attempt} started after its end")
            told.age, told.cached = start.age, start.cached
            self._check_start(told)
        for i, attempt in enumerate(outputs.attempts.tolist()):
            self.told[attempt].take_token(outputs, i)
        for end in outputs.ends:
            self.told[end.attempt].take_end(end)
            if end.reason is EndReason.FAULT:
                self.executor.distrust(end.attempt)
        for answer in outputs.answers:
            self._forgotten += answer.forgotten
        self.stats = outputs.stats
        self._check_stats()

    def _check_start(self, told: Outcome) -> None:
        """The cached tokens that are told are those of the prompt that the executor did not compute."""
        arrival, executor = told.arrival, self.executor
        attempt, prompt = arrival.attempt, len(arrival.request.prompt)
        found, length = executor.found[attempt][0], executor.came_with[attempt]
        name = f"attempt {attempt} starts with {told.cached} cached tokens"
        law(told.cached == min(found, prompt), f"{name}, the executor has {found}")
        law(told.cached < prompt or length > prompt, f"{name}, all of its prompt")
        self._lengths_at_start += length

    def _check_stats(self) -> None:
        """Gauges and counts against the executor's; in `ledger.verify` the manager's own are checked."""
        stats, cache, executor = self.stats, self.scheduler.cache, self.executor
        size = self.workload.layout.page_size
        rows = self._running().values()
        unused = sum(len(table.told) * size - mirror.computed for mirror in rows for table in mirror.tables)
        untold = self.scheduler.running.joins
        law(untold or stats.slots_unused == unused, f"{stats.slots_unused} slots are unused, not {unused}")
        law(stats.pages_used + stats.pages_cached + cache.allocator.free == stats.pages_total, f"pages add up: {stats}")
        law(stats.pages_shared <= stats.pages_used, f"more pages are shared than held: {stats}")
        law(sum(stats.lifetimes) == stats.evicted_capacity, f"lifetimes of all that was evicted: {stats}")
        law(stats.lifetime_seconds <= sum(stats.lifetimes) * (self.turn + 1), f"older than the engine: {stats}")
        law(stats.imbalances == 0, f"the ledger found {stats.imbalances} wrong pages")
        law(stats.evicted_reset == self._forgotten, f"resets took {self._forgotten} pages: {stats}")
        known = self._lengths_at_start if self.workload.prefix_cache else 0
        law(stats.prefix_queries == known, f"{stats.prefix_queries} tokens were looked up, not {known}")
        hits = sum(found[0] for attempt, found in executor.found.items() if self.told[attempt].age is not None)
        law(stats.prefix_hits == hits, f"{stats.prefix_hits} tokens were found, not {hits}")

    def _check_the_end(self) -> None:
        cache, stats = self.scheduler.cache, self.stats
        pool = cache.pool
        law(pool.free == pool.total and not pool.returning, f"{pool.total - pool.free} pages are held without a holder")
        law(
            not cache.allocator.counts.any() and not cache.allocator.shared,
            "pages are counted without a sequence",
        )
        law(not cache.published.frontiers.row_of, "pages are being computed though no sequence is there")
        law(self.workload.prefix_cache or not stats.pages_cached, "pages are cached without a cache")
        running = self.scheduler.running
        law(not running.beams and not running.forced and not running.joins, "something is left of searches or of joins")
        law(not self.scheduler.live_attempts(), "attempts are at work though no sequence is there")
        law(self.scheduler.queue.tokens == 0, "an empty queue counts tokens")
        law((stats.running, stats.waiting, stats.pages_used) == (0, 0, 0), f"idle, but the gauges say {stats}")
        law(stats.computed_tokens == self.executor.computed_tokens, "computed tokens are miscounted")
        again, searches = self.executor.recomputed, any(a.request.beam for a in self.workload.arrivals)
        law(
            searches or stats.recomputed_tokens == again,
            f"{again} tokens were computed again, not {stats.recomputed_tokens}",
        )
        for told in self.told.values():
            check_outcome(told, self.workload, max(self.executor.found.get(told.arrival.attempt, [0])))


def _unbroken(call: Callable[[], Result]) -> Result:
    """Returns what the call returns. Lists and tables of the scheduler never lack what it looks for."""
    try:
        return call()
    except LookupError as error:
        raise LawBroken(f"the scheduler raises {error!r}") from error


def _in_two(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Divides events, all of an attempt on one side."""
    attempts = [getattr(event, "attempt", None) for event in events]
    last = set(attempts[len(events) // 2 :])
    sides: tuple[list[Event], list[Event]] = [], []
    for event, attempt in zip(events, attempts, strict=True):
        sides[attempt in last].append(event)
    return sides
