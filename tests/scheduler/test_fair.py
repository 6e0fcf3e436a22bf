"""Fair service: next is the tenant that has had least, and the service of two that wait stays close."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import Scope
from cache_manager.matching import Match
from scheduler.events import Abort, EndReason, Event, Submit
from scheduler.fair import FairService
from scheduler.parameters import Beam
from scheduler.policy import FirstCome, SchedulingPolicy
from scheduler.preemption_cause import PreemptionCause
from scheduler.queue import Queue
from scheduler.rows import Rows, Sequence
from scheduler.scheduler import Scheduler
from scheduler.service import Service
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan
from tests.scheduler.executor import FakeExecutor, LawBroken, law
from tests.scheduler.outcome import Outcome
from tests.scheduler.play import play
from tests.scheduler.test_preemption import scheduler_of
from tests.scheduler.test_scheduler import reasons, result_of
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.planted import plant

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5}


@dataclass(frozen=True)
class Burst:
    """Requests of a tenant that come at once. cancel: turns after which those that have not ended are cancelled.

    deadline: turns within which the first has to be complete; each of the others has one turn less, down to 1.
    """

    turn: int
    tenant: str
    count: int
    prompt: int
    tokens: int
    cancel: int | None = None
    deadline: int | None = None

    @property
    def deadlines(self) -> list[float | None]:
        """Seconds, of each request."""
        return [None if self.deadline is None else float(max(1, self.deadline - i)) for i in range(self.count)]


@dataclass
class Books:
    """Plain bookkeeping of a run, from its events and outputs.

    Attributes:
        service: By tenant, at the end of each turn: prompts of started requests, and twice the tokens drawn.
        backlogged: By tenant, whether it had requests in the queue at the end of each turn.
        counters: The counters that the paper's algorithm has at present.
        most: Tokens of the sequences that ran at once, at their full lengths, at most.
    """

    weights: dict[str, float]
    tenant: dict[int, str] = field(default_factory=dict)
    prompt: dict[int, int] = field(default_factory=dict)
    total: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counters: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: str | None = None
    service: dict[str, list[float]] = field(default_factory=dict)
    backlogged: dict[str, list[bool]] = field(default_factory=dict)
    most: int = 0

    def serve(self, attempt: int, service: float) -> None:
        tenant = self.tenant[attempt]
        self.total[tenant] += service
        self.counters[tenant] += service / self.weights[tenant]

    def come(self, submit: Submit) -> None:
        attempt, tenant = submit.attempt, submit.request.scope.tenant
        self.tenant[attempt], self.prompt[attempt] = tenant, len(submit.request.prompt)

    def begin_to_wait(self, tenant: str, queue: Queue) -> None:
        waiting = {one.tenant for one in queue.in_order()}
        if tenant not in waiting:
            others = waiting or ({self.last} if self.last else set[str]())
            least = min((self.counters[one] for one in others), default=0.0)
            self.counters[tenant] = max(self.counters[tenant], least)

    def note_turn(self, queue: Queue) -> None:
        for tenant in self.weights:
            self.service.setdefault(tenant, []).append(self.total[tenant] / self.weights[tenant])
            self.backlogged.setdefault(tenant, []).append(queue.load_of(tenant).requests > 0)

    @property
    def bound(self) -> float:
        longest = max(self.prompt.values())
        return 2 * max(longest, 2 * self.most) / min(self.weights.values())

    @property
    def gap(self) -> float:
        """The most that the difference of two tenants' service changes while both have requests in the queue."""
        found, names = 0.0, list(self.weights)
        for one, other in ((f, g) for i, f in enumerate(names) for g in names[:i]):
            difference = np.array(self.service[one]) - np.array(self.service[other])
            both = np.array(self.backlogged[one]) & np.array(self.backlogged[other])
            for stretch in np.split(difference, np.flatnonzero(np.diff(both)) + 1):
                found = max(found, np.ptp(stretch)) if both[0] else found
                both = both[len(stretch) :]
        return found


def run(
    bursts: list[Burst], policy: SchedulingPolicy, weights: dict[str, float], rows: int = 4, pages: int = 64
) -> Books:
    """Plays bursts, and checks that each request ends. Under `FairService` also who is next."""
    scheduler, books = scheduler_of(policy, rows, pages), Books(weights)
    start, wait, is_fair = scheduler.running.start, scheduler.running.wait, isinstance(policy, FairService)
    queued = scheduler.queue.in_order
    submits: dict[int, tuple[Burst, Submit]] = {}
    for burst in bursts:
        for deadline in burst.deadlines:
            attempt = len(submits)
            request = make_request(attempt, burst.prompt, burst.tokens, scope=Scope(burst.tenant))
            submits[attempt] = burst, Submit(attempt, replace(request, deadline=deadline))
    seen = set[int]()

    def starting(sequence: Sequence, match: Match) -> int:
        mine = books.counters[sequence.tenant]
        for other in {one.tenant for one in queued()} if is_fair else ():
            law(mine <= books.counters[other] + 1e-6, f"{sequence.tenant} has had more than {other}, and is next")
        ahead = [one.attempt for one in queued() if one.tenant == sequence.tenant and one.order < sequence.order]
        law(not ahead or not is_fair, f"{sequence.attempt} is next, of the same tenant {ahead} are before it")
        if sequence.attempt not in seen:
            seen.add(sequence.attempt)
            books.serve(sequence.attempt, books.prompt[sequence.attempt])
            books.last = sequence.tenant
        return start(sequence, match)

    def waiting(sequence: Sequence, *deadline: float) -> None:
        if sequence.attempt not in books.tenant:
            books.come(submits[sequence.attempt][1])
        books.begin_to_wait(sequence.tenant, scheduler.queue)
        wait(sequence, *deadline)

    scheduler.running.start, scheduler.running.wait = starting, waiting
    ended, turn = dict[int, EndReason](), 0
    while turn <= max(one.turn for one in bursts) or scheduler.has_work or scheduler.has_news:
        law(turn < 5000, "still at work")
        events: list[Event] = [submit for burst, submit in submits.values() if burst.turn == turn]
        # Behind the submits: a tenant whose queue is empty in between would have a stretch that no turn's end shows.
        events += [Abort(i) for i, (burst, _) in submits.items() if burst.cancel and burst.turn + burst.cancel == turn]
        plan = scheduler.schedule(float(turn), events)
        books.most = max(books.most, int(scheduler.rows.max_length[scheduler.rows.active()].sum()))
        outputs = scheduler.commit(None if plan is None else result_of(plan, [1] * len(plan.logits)), float(turn))
        for attempt in outputs.attempts.tolist():
            books.serve(attempt, 2.0)
        ended |= dict(reasons(outputs))
        books.note_turn(scheduler.queue)
        turn += 1
    law(ended.keys() == submits.keys(), "not all have ended")
    finished = [i for i, reason in ended.items() if reason is EndReason.FINISHED]
    law(all(submits[i][0].cancel for i in finished), "one ends that nobody cancelled")
    return books


SMALL = st.builds(
    Burst, st.integers(0, 30), st.sampled_from("ab"), st.integers(5, 25), st.integers(1, 3), st.integers(1, 3)
)
GIANT = st.builds(
    Burst, st.integers(0, 30), st.sampled_from("bc"), st.integers(1, 4), st.integers(20, 60), st.integers(10, 30)
)
STORM = st.builds(
    Burst,
    st.integers(0, 30),
    st.sampled_from("abc"),
    st.integers(5, 15),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 9),
)
BURSTS = st.lists(SMALL | GIANT | STORM, min_size=2, max_size=8)
ROOM = st.sampled_from([(1, 32), (3, 32), (6, 32), (4, 160), (8, 400)])  # rows, pages: with preemptions, and without


def check_bound(bursts: list[Burst], weights: dict[str, float], room: tuple[int, int]) -> Books:
    books = run(bursts, FairService(weights), weights, *room)
    law(books.gap <= books.bound, f"service differs by {books.gap}, the bound is {books.bound}")
    return books


@settings(max_examples=examples(60), deadline=None)
@given(BURSTS, st.sampled_from([WEIGHTS, dict.fromkeys("abc", 1.0)]), ROOM)
def test_service_of_tenants_that_wait_stays_within_the_bound(
    bursts: list[Burst], weights: dict[str, float], room: tuple[int, int]
) -> None:
    check_bound(bursts, weights, room)


EQUAL = {"a": 1.0, "b": 1.0}
FLOOD = [Burst(0, "a", 300, 4, 4), Burst(1, "b", 40, 20, 10)]  # many small ones, and larger ones a moment later


def test_many_small_ones_and_few_giants_are_served_alike() -> None:
    books = check_bound(FLOOD, EQUAL, (3, 64))
    assert min(sum(one) for one in books.backlogged.values()) > 100, "else nothing was shown"


def test_first_come_breaks_the_bound() -> None:
    books = run(FLOOD, FirstCome(), EQUAL, 3, 64)
    assert books.gap > 5 * books.bound


def test_service_goes_by_weight() -> None:
    weights = {"a": 1.0, "b": 3.0}
    books = check_bound([Burst(0, one, 200, 4, 4) for one in "ab"], weights, (2, 64))
    turns = sum(books.backlogged["b"])  # all of which "a" had requests, too
    a, b = (books.service[one][turns - 1] * weights[one] for one in "ab")
    assert b / a == pytest.approx(3.0, rel=0.1)


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    """It comes when the other has had much, and they go on by turns."""
    books = check_bound([Burst(0, "a", 200, 4, 4), Burst(200, "b", 100, 4, 4)], EQUAL, (1, 64))
    at = books.backlogged["b"].index(True)
    gained = [books.service[one][at + 80] - books.service[one][at] for one in "ab"]
    assert abs(gained[0] - gained[1]) <= books.bound
    assert min(gained) > 100


def test_one_that_comes_to_an_empty_queue_starts_from_the_last_one() -> None:
    """Else it would be served for as long as the other has been before, once both come back."""
    bursts = [Burst(0, "a", 100, 4, 4), Burst(500, "b", 2, 4, 4), Burst(501, "a", 50, 4, 4), Burst(501, "b", 50, 4, 4)]
    check_bound(bursts, EQUAL, (1, 64))


def test_a_preempted_sequence_waits_by_its_tenants_counter() -> None:
    scheduler = scheduler_of(FairService({}), rows=2)
    events = [Submit(i, make_request(i, 8, 20, scope=Scope(tenant))) for i, tenant in enumerate("ab", 1)]
    scheduler.schedule(0.0, events)
    scheduler.running.preempt(scheduler.rows.row_of(1) or 0, PreemptionCause.PAGES)
    heavy = Submit(3, make_request(3, 2, 4, scope=Scope("c")))
    scheduler.intake.take(heavy, 1.0)
    order = [one.attempt for one in scheduler.policy.waiting(scheduler.queue, scheduler.rows, 1.0)]
    assert order == [1, 3], "c was lifted to what a has had, and a came first"
    scheduler.rows.service.lift(scheduler.rows.tenant_number("a"), 1.0)
    order = [one.attempt for one in scheduler.policy.waiting(scheduler.queue, scheduler.rows, 1.0)]
    assert order == [3, 1]


def test_a_tenant_whose_row_gives_way_has_saved_nothing_up() -> None:
    """`a` has had little while one of its outputs ran and nothing of it waited."""
    scheduler = scheduler_of(FairService({}), rows=2)
    events = [Submit(i, make_request(i, 8, 20, scope=Scope(tenant))) for i, tenant in enumerate("abb", 1)]
    scheduler.schedule(0.0, events)
    scheduler.rows.service.lift(scheduler.rows.tenant_number("b"), 1000.0)
    before = scheduler.policy.counters(scheduler.rows, "ab")
    assert before["b"] > before["a"] + 900.0
    scheduler.running.preempt(scheduler.rows.row_of(1) or 0, PreemptionCause.PAGES)
    after = scheduler.policy.counters(scheduler.rows, "ab")
    assert after["a"] == after["b"] == before["b"]


# What is counted


class Drawn(FakeExecutor):
    """Counts all draws."""

    def launch(self, plan: StepPlan) -> None:
        self.__dict__["draws"] = self.__dict__.get("draws", 0) + len(plan.logits)
        super().launch(plan)


def check_counts(workload: Workload) -> None:
    """All tokens that are told count once as output, and the others once as input, over preemptions and forks.

    Of a search those count that its hypotheses draw and keep, or give to a fork: more than it tells, and at most all.
    """
    scheduler = Scheduler(workload.settings, workload.queue, workload.cache, workload.hasher)
    take, told, began, add = Outcome.take_token, [0], dict[tuple[int, int], int](), scheduler.rows.add
    executor = Drawn(workload.layout, workload.pages, workload.settings)

    def taking(self: Outcome, *args) -> None:
        told[0] += 1
        take(self, *args)

    def adding(sequence: Sequence) -> int:
        forks = sequence.index not in {i for a in workload.arrivals if a.attempt == sequence.attempt for i in a.heads}
        began.setdefault(sequence.key, 0 if forks else sequence.length)
        return add(sequence)

    scheduler.rows.add = adding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outcome, "take_token", taking)
        play(workload, scheduler, executor, patience=4)
    service = scheduler.rows.service
    output, searches = sum(service.output.values()), any(a.request.beam for a in workload.arrivals)
    law(output <= vars(executor).get("draws", 0) if searches else output == told[0], f"{output} tokens were drawn")
    law(sum(service.input.values()) == sum(began.values()), f"{service.input} tokens came, {began}")


@settings(max_examples=examples(100), deadline=None)
@given(workloads(cancels=True, resumed=True) | workloads(several=True, resumed=True))
def test_tokens_count_once(workload: Workload) -> None:
    check_counts(workload)


def test_hypotheses_of_a_search_count() -> None:
    """Two go on after each of seven rounds, with a token each. The eighth ends them."""
    request = replace(make_request(1, 4, 8), beam=Beam(2, 1.0), count=1)
    workload = Workload((Arrival(1, 0, request),), make_layout(4), 64, SchedulerSettings(16, 4))
    check_counts(workload)
    scheduler = Scheduler(workload.settings, workload.queue, workload.cache)
    play(workload, scheduler, FakeExecutor(workload.layout, workload.pages, workload.settings))
    assert (scheduler.rows.service.input[0], scheduler.rows.service.output[0]) == (4, 14)


# Bugs, each of which the laws above catch.


def the_last_tenant_is_forgotten(real):
    def admit(self, tenant, number, tokens):
        real(self, tenant, number, tokens)
        self.last = None

    return admit


def nobody_is_lifted(real):
    return lambda self, number, by: None


def prompts_are_free(real):
    return lambda self, tenant, number, tokens: real(self, tenant, number, 0)


def output_is_free(real):
    return lambda self, number, tokens: real(self, number, 0)


def weights_are_ignored(real):
    return lambda self, tenant: 1.0


def tokens_of_rows_count_when_they_leave(real):
    def counters(self, rows, tenants):
        lengths, rows.length = rows.length, rows.served + rows.drafts
        found = real(self, rows, tenants)
        rows.length = lengths
        return found

    return counters


def a_preempted_sequence_pays_again(real):
    def add(self, sequence):
        sequence.served = 0
        return real(self, sequence)

    return add


FAULTS: list[tuple[type, str, Callable]] = [
    (Service, "admit", the_last_tenant_is_forgotten),
    (Service, "lift", nobody_is_lifted),
    (Service, "admit", prompts_are_free),
    (Service, "leave", output_is_free),
    (FairService, "weight", weights_are_ignored),
    (FairService, "counters", tokens_of_rows_count_when_they_leave),
    (Rows, "add", a_preempted_sequence_pays_again),
]

SHOWING = [
    (FLOOD, EQUAL, (3, 64)),
    ([Burst(0, one, 60, 4, 4) for one in "abc"], WEIGHTS, (2, 64)),
    ([Burst(0, "a", 60, 4, 4), Burst(60, "b", 30, 4, 4)], EQUAL, (1, 64)),
    ([Burst(0, "a", 9, 4, 4), Burst(99, "b", 2, 4, 4), Burst(100, "a", 50, 4, 4)], EQUAL, (1, 64)),
    ([Burst(0, one, 12, 12, 30) for one in "ab"], EQUAL, (6, 24)),
]


def check_all_that_show() -> None:
    for bursts, weights, room in SHOWING:
        check_bound(bursts, weights, room)


@pytest.mark.parametrize(("target", "name", "stand_in"), FAULTS, ids=[one[2].__name__ for one in FAULTS])
def test_harness_catches(target: type, name: str, stand_in: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, target, name, stand_in)
    with pytest.raises(LawBroken):
        check_all_that_show()


def test_without_a_fault_they_hold() -> None:
    check_all_that_show()


# The setting


def test_weights_are_read() -> None:
    assert SchedulerSettings(tenant_weights="ann=2, bob=0.5").weights == {"ann": 2.0, "bob": 0.5}
    assert SchedulerSettings().weights == {}


@pytest.mark.parametrize("text", ["", "ann", "ann=", "=2", "ann=0", "ann=-1", "ann=nan", "ann=inf", "ann=1,", "a=x"])
def test_what_is_no_weight_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--tenant-weights has .*, must be NAME=WEIGHT"):
        SchedulerSettings(tenant_weights=text)


def test_a_tenant_has_one_weight() -> None:
    with pytest.raises(ValueError, match="--tenant-weights names 'ann' twice"):
        SchedulerSettings(tenant_weights="ann=1,ann=2")
