"""Explains a recording: replays it, and splits the time of each request by what it was doing.

Time goes on from one call of `schedule` to the next, and is what the plan made of the request in between. Times are
whole nanoseconds, so intervals add up to the latency exactly.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.events import StepOutputs, Submit
from scheduler.preemption_cause import PreemptionCause
from scheduler.replaying import Recording, Replay, ReplayedCall
from scheduler.rows import Sequence
from scheduler.step import StepPlan

NANOSECONDS = 1_000_000_000


class TimelinePhase(StrEnum):
    """Activity of a request. Of several sequences of one request, the last of these that any of them does counts."""

    QUEUED = "queued"  # it waits for its first row
    HELD = "held"  # it waits for its grammar, or for a logits processor
    PREEMPTED = "preempted"  # it had a row and waits for another
    SAT_OUT = "sat out"  # it has a row, of which the step computes nothing
    RECOMPUTE = "recompute"  # the step computes what a preemption has lost
    PREFILL = "prefill"
    DECODE = "decode"


PHASES = tuple(TimelinePhase)
WAITING = (TimelinePhase.QUEUED, TimelinePhase.HELD, TimelinePhase.PREEMPTED)


class Lack(StrEnum):
    """Need of a waiting request."""

    ROW = "no row is free"
    PAGES = "too few pages are free"
    PREFIX = "another request computes its next prefix page"
    ISOLATED = "one request runs isolated"
    TURN = "others come first, or the step's budget is used up"


@dataclass(slots=True, eq=False)
class TimelineInterval:
    """A time in which a request stays in one phase.

    Attributes:
        start: Nanoseconds on the engine's clock.
        end: As `start`; also the start of the next interval.
        steps: Steps that computed some of its tokens.
        tokens: Tokens that they computed.
        lacks: Nanoseconds by what it lacked. Only of the request that is asked for.
        behind: Nanoseconds by attempt that had a row meanwhile. Only of the request that is asked for.
        by: Attempts that took pages in the step that preempted it; () where its copy in host memory was lost.
        causes: Causes of the preemptions of its sequences that wait; () where it was not preempted.
    """

    phase: TimelinePhase
    start: int
    end: int
    steps: int = 0
    tokens: int = 0
    lacks: Counter[Lack] = field(default_factory=Counter)
    behind: Counter[int] = field(default_factory=Counter)
    by: tuple[int, ...] = ()
    causes: tuple[PreemptionCause, ...] = ()


@dataclass(slots=True, eq=False)
class RequestTimeline:
    """Time of one request, from the call that took it in to the one that reported its end.

    Attributes:
        attempt: Number of the attempt.
        prompt: Prompt tokens.
        cached: Prompt tokens that were in the prefix cache.
        output: Output tokens.
        ended: Reason of its end; "" where the recording ends before it.
        came_before: It came before the recording began; its time and its output are those from there on.
        intervals: Its time, without gaps.
    """

    attempt: int
    prompt: int
    cached: int = 0
    output: int = 0
    ended: str = ""
    came_before: bool = False
    intervals: list[TimelineInterval] = field(default_factory=list)

    @property
    def latency(self) -> int:
        """Nanoseconds from its first call to its last."""
        return self.intervals[-1].end - self.intervals[0].start

    def split(self) -> dict[TimelinePhase, int]:
        """Returns the nanoseconds in each phase."""
        spent = dict.fromkeys(PHASES, 0)
        for one in self.intervals:
            spent[one.phase] += one.end - one.start
        return spent


class Explanation:
    """Timelines of all requests of a recording.

    Attributes:
        replay: The replay, which has run.
        timelines: By attempt, in order of arrival.
        began: Nanoseconds on the engine's clock at the first call.
    """

    def __init__(self, recording: Recording, asked: int | None = None) -> None:
        """Replays a recording. asked: attempt whose waits are looked into. Raises RecordingError."""
        self.replay, self._asked = Replay(recording), asked
        self.timelines: dict[int, RequestTimeline] = {}
        self.began = 0
        self._open: dict[int, TimelineInterval] = {}  # the current interval of each attempt that has not ended
        self._held: set[int] = set()
        self._in_rows: set[int] = set()
        self._was_in_row: set[int] = set()
        self._drew: set[int] = set()  # attempts that have drawn a token
        self._departures = 0
        self._lacked: Lack | None = None  # of the attempt that is asked for, since the last call
        self._behind: list[int] = []
        self._now = 0
        self._take_live()
        for number, call in enumerate(self.replay):
            now = round(call.now * NANOSECONDS)
            if not number:
                self.began = self._now = now
                for current in self._open.values():
                    current.start = current.end = now
            self._charge(now - self._now)
            self._now = now
            if call.outputs is None:
                self._scheduled(call)
            else:
                self._committed(call.outputs)
            self._look(planned=call.outputs is None)
        # Of those cancelled in the last call: the commit that reports their ends is in the next part, if anywhere.
        ends = {end.attempt: end.reason.value for end in self.replay.scheduler.pending_ends if not end.more}
        for attempt in list(self._open):
            self._close(attempt, ends.get(attempt, ""))

    def slowest(self) -> list[RequestTimeline]:
        """Returns the timelines by latency, the longest first."""
        return sorted(self.timelines.values(), key=lambda one: -one.latency)

    def _take_live(self) -> None:
        """Begins the timelines of attempts that are live as the recording begins."""
        rows, queue = self.replay.scheduler.rows, self.replay.scheduler.queue
        active = rows.active()
        running = {int(rows.attempt[row]): rows.sequence(row) for row in active.tolist()}
        self._drew.update(rows.attempt[active[rows.scheduled[active] + 1 >= rows.length[active]]].tolist())
        for one in (*running.values(), *queue.in_order()):
            new = RequestTimeline(one.attempt, len(one.request.prompt), came_before=True)
            self.timelines.setdefault(one.attempt, new)
            if one.preempted:
                self._was_in_row.add(one.attempt)
            if one.attempt in running:
                self._in_rows.add(one.attempt)
                drew = one.attempt in self._drew
                self._enter(one.attempt, TimelinePhase.DECODE if drew else TimelinePhase.PREFILL)
            else:
                self._wait(one.attempt)

    def _scheduled(self, call: ReplayedCall) -> None:
        for event in call.events:
            if isinstance(event, Submit):
                self.timelines[event.attempt] = RequestTimeline(event.attempt, len(event.request.prompt))
                self._enter(event.attempt, TimelinePhase.QUEUED)
        held = self.replay.scheduler.held
        for attempt in [*held, *self._held - held.keys()]:
            if attempt in self._open and self._open[attempt].phase in WAITING:
                self._wait(attempt)
        self._held = set(held)
        running = self._running(call.plan)
        self._departures = self.replay.scheduler.rows.departures
        self._find_preempted(running.keys(), call.plan)
        for attempt, (phase, tokens) in running.items():
            self._enter(attempt, phase)
            if tokens:
                self._open[attempt].steps += 1
                self._open[attempt].tokens += tokens

    def _running(self, plan: StepPlan | None) -> dict[int, tuple[TimelinePhase, int]]:
        """Returns phase and computed tokens of each attempt that has a row."""
        rows, found = self.replay.scheduler.rows, dict[int, tuple[TimelinePhase, int]]()
        active = rows.active()
        slices = {} if plan is None else {row: (start, count) for row, start, count in plan.slices.tolist()}
        drafts = Counter[int]() if plan is None else Counter(plan.drafts[:, 0].tolist())
        each = zip(*(a[active].tolist() for a in (rows.attempt, rows.prompt, rows.lost)), strict=True)
        for row, (attempt, prompt, lost) in zip(active.tolist(), each, strict=True):
            phase, count = TimelinePhase.SAT_OUT, 0
            if row in slices:
                start, count = slices[row]
                # Of an output prefix, too, several tokens behind the prompt are computed at once, before any is drawn.
                decodes = start >= prompt and (count == 1 + drafts[row] or attempt in self._drew)
                phase = (
                    TimelinePhase.RECOMPUTE
                    if start < lost
                    else TimelinePhase.DECODE
                    if decodes
                    else TimelinePhase.PREFILL
                )
            elif plan is None and (current := self._open[attempt].phase) not in WAITING:
                phase = current  # no step was planned, since one is in flight: it goes on
            before, tokens = found.get(attempt, (phase, 0))
            found[attempt] = max(phase, before, key=PHASES.index), tokens + count
        return found

    def _find_preempted(self, running: Collection[int], plan: StepPlan | None) -> None:
        """Finds attempts that had a row and have none, and have not ended. plan: None where none took their pages."""
        gone = self._in_rows - set(running)
        self._in_rows = set(running)
        if not gone:
            return
        live = set(self.replay.scheduler.live_attempts())
        rows = [] if plan is None else plan.grown[:, 1].tolist()
        takers = tuple(sorted({int(self.replay.scheduler.rows.attempt[row]) for row in rows}))
        for attempt in gone & live:
            self._was_in_row.add(attempt)
            self._wait(attempt, takers)

    def _committed(self, outputs: StepOutputs) -> None:
        for start in outputs.starts:
            self.timelines[start.attempt].cached = start.cached
        for attempt, count in Counter(outputs.attempts.tolist()).items():
            self.timelines[attempt].output += count
            self._drew.add(attempt)
        for end in outputs.ends:
            if not end.more and end.attempt in self._open:
                self._close(end.attempt, end.reason.value)
        rows = self.replay.scheduler.rows
        if rows.departures != self._departures:
            self._departures = rows.departures
            self._find_preempted(rows.attempts(), None)

    def _wait(self, attempt: int, takers: tuple[int, ...] = ()) -> None:
        """Enters the phase of an attempt that waits. takers: as `TimelineInterval.by`."""
        held = attempt in self.replay.scheduler.held
        again = TimelinePhase.PREEMPTED if attempt in self._was_in_row else TimelinePhase.QUEUED
        self._enter(attempt, TimelinePhase.HELD if held else again)
        current = self._open[attempt]
        current.by = current.by or takers
        current.causes = current.causes or self.replay.scheduler.running.causes(attempt)

    def _enter(self, attempt: int, phase: TimelinePhase) -> None:
        """Begins an interval, unless the attempt is in this phase already."""
        current = self._open.get(attempt)
        if current is not None:
            if current.phase is phase:
                return
            self._end(attempt, current)
        self._open[attempt] = TimelineInterval(phase, self._now, self._now)

    def _end(self, attempt: int, interval: TimelineInterval) -> None:
        interval.end = self._now
        if interval.end > interval.start or interval.steps:
            self.timelines[attempt].intervals.append(interval)

    def _close(self, attempt: int, reason: str) -> None:
        """Ends the timeline of an attempt."""
        timeline, last = self.timelines[attempt], self._open.pop(attempt)
        self._in_rows.discard(attempt)
        self._end(attempt, last)
        if not timeline.intervals:  # refused at once
            timeline.intervals.append(last)
        timeline.ended = reason

    def _look(self, planned: bool) -> None:
        """Notes what the attempt that is asked for lacks, and who has rows, as the last plan left it.

        Args:
            planned: Whether a plan was just made. A commit frees rows and pages, but no one takes them before a plan.
        """
        current = None if self._asked is None else self._open.get(self._asked)
        if current is None or current.phase not in (TimelinePhase.QUEUED, TimelinePhase.PREEMPTED):
            self._lacked = None
        elif planned or self._lacked is None:
            self._lacked, self._behind = self._lack(), sorted(self._in_rows)

    def _charge(self, spent: int) -> None:
        """Counts the time since the last call. spent: nanoseconds."""
        if self._lacked is not None and self._asked is not None and spent:
            current = self._open[self._asked]
            current.lacks[self._lacked] += spent
            current.behind.update(dict.fromkeys(self._behind, spent))

    def _lack(self) -> Lack:
        """Returns what the attempt that is asked for lacks at this moment, most obvious first."""
        scheduler = self.replay.scheduler
        waiting = next((one for one in scheduler.queue.in_order() if one.attempt == self._asked), None)
        if scheduler.stats().isolated:
            return Lack.ISOLATED
        if not scheduler.rows.free:
            return Lack.ROW
        if waiting is not None and waiting.awaited is not None:
            return Lack.PREFIX
        return Lack.PAGES if waiting is not None and self._lacks_pages(waiting) else Lack.TURN

    def _lacks_pages(self, waiting: Sequence) -> bool:
        """Whether too few pages are free, or were when it was its turn: running rows may be expected to need them."""
        if waiting.blocked is not None:
            return True
        cache, settings = self.replay.scheduler.cache, self.replay.scheduler.settings
        return cache.pool.free - len(self._in_rows) < cache.layout.pages_for(waiting.length, settings.ahead)
