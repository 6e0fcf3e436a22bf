"""The waiting queue, beside a plain list."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.block_hash import Scope
from scheduler.queue import Queue, QueueLoad
from scheduler.rows import Sequence
from tests.scheduler.workloads import make_request
from tests.support.examples import examples

TIMES = st.integers(0, 20).map(float)
WAITS = TIMES | st.just(math.inf)


EARLIER = 1000


def sequence(
    attempt: int, prompt: int = 3, emitted: int = 0, preempted: bool = False, order: int | None = None
) -> Sequence:
    output = np.zeros(emitted, np.int32)
    place = attempt if order is None else order
    request = make_request(attempt, prompt, scope=Scope(tenant_of(attempt)))
    return Sequence(attempt, request, output, 0.0, place, preempted, expected=attempt)


def tenant_of(attempt: int) -> str:
    return "ab"[attempt % 2]


class QueueModel(RuleBasedStateMachine):
    """`line` is the model: (attempt, length, deadline or None) in order. An attempt comes once."""

    def __init__(self):
        super().__init__()
        self.queue = Queue()
        self.line: list[tuple[int, int, float | None]] = []
        self.served: list[int] = []
        self.orders: dict[int, int] = {}
        self.now = 0.0
        self.attempts = 0

    @rule(prompt=st.integers(1, 9), emitted=st.integers(0, 9), wait=WAITS)
    def push(self, prompt, emitted, wait):
        self.attempts += 1
        self.orders[self.attempts] = self.attempts
        self.queue.push(sequence(self.attempts, prompt, emitted), self.now + wait)
        self.line.append((self.attempts, prompt + emitted, self.now + wait))

    @rule(prompt=st.integers(1, 9), emitted=st.integers(0, 9), wait=WAITS)
    def come_again(self, prompt, emitted, wait):
        """From another engine: before all that were not served yet, after those that came back so earlier."""
        self.attempts += 1
        order = self.orders[self.attempts] = self.attempts - EARLIER
        self.queue.push(sequence(self.attempts, prompt, emitted, order=order), self.now + wait)
        self._insert(self.attempts, prompt + emitted, self.now + wait)

    def _insert(self, attempt, length, deadline):
        before = [one for one in self.line if self.orders[one[0]] < self.orders[attempt]]
        self.line.insert(len(before), (attempt, length, deadline))

    @precondition(lambda self: self.line)
    @rule()
    def serve_the_head(self):
        attempt = self.line.pop(0)[0]
        assert self.queue.remove(attempt).attempt == attempt
        self.served.append(attempt)

    @precondition(lambda self: self.served)
    @rule(prompt=st.integers(1, 9))
    def preempt(self, prompt):
        attempt = self.served.pop()
        self.queue.push(sequence(attempt, prompt, preempted=True, order=self.orders[attempt]))
        self._insert(attempt, prompt, None)

    @rule(attempt=st.integers(1, 30))
    def remove(self, attempt):
        kept = [entry for entry in self.line if entry[0] != attempt]
        assert (self.queue.remove(attempt) is not None) == (len(kept) < len(self.line))
        self.line = kept

    @rule(later=TIMES)
    def expire(self, later):
        self.now += later
        gone = [entry for entry in self.line if entry[2] is not None and entry[2] <= self.now]
        expired = [one.attempt for one in self.queue.expired(self.now)]
        assert expired == [attempt for attempt, _, _ in sorted(gone, key=lambda entry: (entry[2], entry[0]))]
        self.line = [entry for entry in self.line if entry not in gone]

    @invariant()
    def agree(self):
        attempts = [attempt for attempt, _, _ in self.line]
        assert self.queue.attempts() == attempts
        assert len(self.queue) == len(attempts)
        assert [one.attempt for one in self.queue.in_order()] == attempts
        assert self.queue.tokens == sum(length for _, length, _ in self.line)
        assert self.queue.expected == sum(attempts)
        assert self.queue.mean_output == (np.mean(attempts) if attempts else None)

    @invariant()
    def count_what_is_in_front(self):
        for place, (attempt, _, _) in enumerate(self.line):
            own = [length for one, length, _ in self.line if tenant_of(one) == tenant_of(attempt)]
            before = sum(tenant_of(one) == tenant_of(attempt) for one, _, _ in self.line[:place])
            order = self.orders[attempt]
            assert self.queue.load_before(order).requests == place
            load = QueueLoad(before, sum(own) * before // len(own))
            assert self.queue.load_before(order, tenant_of(attempt)) == load


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)


def test_expired_come_by_deadline_not_by_place():
    queue = Queue()
    for attempt, deadline in ((1, 5.0), (2, 3.0), (3, 4.0), (4, 9.0)):
        queue.push(sequence(attempt), deadline)
    assert [one.attempt for one in queue.expired(5.0)] == [2, 3, 1]
    assert queue.attempts() == [4]
    assert queue.expired(8.9) == []


def test_a_preempted_sequence_has_no_deadline():
    queue = Queue()
    queue.push(sequence(1), 5.0)
    queue.push(queue_again := queue.remove(1))
    queue_again.preempted = True
    assert queue.expired(100.0) == []
    assert queue.attempts() == [1]


def test_an_heir_waits_in_the_place_of_another_and_as_long_as_it():
    queue = Queue()
    for attempt, deadline in ((1, 5.0), (2, 4.0), (3, math.inf)):
        queue.push(sequence(attempt), deadline)
    for attempt in (1, 3):
        parent = queue.get(attempt)
        queue.replace(parent, replace(parent, index=1))
    assert [one.key for one in queue.in_order()] == [(1, 1), (2, 0), (3, 1)]
    assert [one.key for one in queue.expired(4.5)] == [(2, 0)]
    assert [one.key for one in queue.expired(1e9)] == [(1, 1)], "the heir of one that waits for ever does so too"
    assert (queue.attempts(), len(queue)) == ([3], 1)


class Place(int):
    """Counts with how many others it is compared."""

    compared = 0

    def __lt__(self, other: object) -> bool:
        Place.compared += 1
        return isinstance(other, int) and int(self) < int(other)

    def __gt__(self, other: object) -> bool:
        return isinstance(other, int) and int(other) < self


def test_many_that_come_again_at_once_cost_no_more_each():
    """All streams of an engine that died, at one that has a queue of its own: each is found a place at once."""
    queue, count = Queue(), 20_000
    new, again = range(1, count + 1), range(count + 1, 2 * count + 1)
    for attempt in new:
        queue.push(sequence(attempt), math.inf)
    came = [sequence(attempt, order=Place(attempt - 10 * count)) for attempt in again]
    for one in came:
        queue.push(one, math.inf)
    assert 0 < Place.compared < 40 * count, "each looks at few of the others, not at all of them"
    assert queue.attempts() == [*again, *new]
