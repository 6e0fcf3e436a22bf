"""The laws of a deployment: each request ends once, no token is lost or comes twice, and nothing is left behind."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cache_manager.ledger import verify
from rpc.frontend.replicas import Replica
from rpc.simulation.cluster import COLUMNS, PARKED_SECONDS, Cluster
from rpc.simulation.engine import SimulatedEngine
from rpc.simulation.served import REFUSED, Floats, Ledger, Serving
from scheduler.events import SHORT_HASH, End, EndReason, StepOutputs
from tests.scheduler.executor import law
from tests.simulation.drawn import Drawn

LATEST = 10 * PARKED_SECONDS  # seconds: the longest that a drawn deployment may take
DRAIN_WAKES = 10  # of an engine whose requests have ended: its steps in flight, and news


class Once(dict[int, EndReason]):
    """Reasons by request, each of which is set once."""

    def __setitem__(self, request: int, reason: EndReason) -> None:
        law(request not in self, f"request {request} ends with {reason.value}, and has ended before")
        super().__setitem__(request, reason)


class OrderedLedger(Ledger):
    """A ledger to which each token comes once, in order, and each end once.

    Attributes:
        seen: Tokens by request and sequence.
        most_outputs: Outputs of engines after which the simulation counts as stuck.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.most_outputs = math.inf
        self.reasons = Once()
        self.seen: dict[int, Counter[int]] = defaultdict(Counter)
        self._newest = dict(enumerate(range(count)))  # attempt of each request
        self._over = set[tuple[int, int]]()  # attempts and sequences that have ended

    def again(self, request: int) -> int:
        attempt = self._newest[request] = super().again(request)
        law(request not in self.reasons, f"request {request} goes on after its end")
        return attempt

    def take(self, outputs: StepOutputs, now: float) -> tuple[Floats, Floats]:
        self.most_outputs -= 1
        law(self.most_outputs >= 0, "engines go on and on, and requests are open")
        each = self._check_attempts(outputs.attempts)
        values = (outputs.indices.tolist(), outputs.positions.tolist(), outputs.tokens.tolist())
        for request, index, position, token in zip(each, *values, strict=True):
            self._check_token(request, index, position, token)
            self.seen[request][index] += 1
        for end in outputs.ends:
            self._check_end(end)
        return super().take(replace(outputs, ends=tuple(end for end in outputs.ends if not end.more)), now)

    def _check_token(self, request: int, index: int, position: int, token: int) -> None:
        seen, where = self.seen[request], f"request {request}, sequence {index}"
        law(position == seen[index], f"{where}: position {position} comes after {seen[index]} tokens")
        law((self._newest[request], index) not in self._over, f"{where}: a token comes after its end")

    def _check_attempts(self, attempts: NDArray[np.int64]) -> list[int]:
        """Returns the requests of attempts, each of which has to be the newest one of its request."""
        each = self.requests_of(attempts).tolist()
        for attempt, request in zip(attempts.tolist(), each, strict=True):
            law(self._newest[request] == attempt, f"request {request} has a token of an attempt that was given up")
        return [int(request) for request in each]

    def _check_end(self, end: End) -> None:
        request = self.request_of(end.attempt)
        where = f"request {request}, sequence {end.index}"
        law(self._newest[request] == end.attempt, f"{where}: an attempt ends that was given up")
        law((end.attempt, end.index) not in self._over, f"{where} ends twice")
        self._over.add((end.attempt, end.index))


class StrictLedger(OrderedLedger):
    """A ledger that also compares each token and each end with what clients may get.

    Attributes:
        moved: Requests that went on at another engine.
    """

    def __init__(self, drawn: Drawn) -> None:
        super().__init__(len(drawn.clients))
        self.moved: set[int] = set()
        self._drawn, self._depth = drawn, drawn.deployment.blueprint.settings.depth
        self._late: Counter[int] = Counter()  # steps with tokens of a request that its client wants no more of

    def again(self, request: int) -> int:
        self.moved.add(request)
        if self._drawn.clients[request].request.count > 1:
            self.seen.pop(request, None)  # it begins anew, as the guide says
        return super().again(request)

    def take(self, outputs: StepOutputs, now: float) -> tuple[Floats, Floats]:
        law(now < LATEST, f"requests {self._open()} are open after {now:.0f} s")
        for request in set(self.requests_of(outputs.attempts).tolist()):
            one, seen = self._drawn.clients[request], self.seen[request]
            if request in self.cut or (one.enough is not None and seen[0] >= one.enough):
                self._late[request] += 1
                law(self._late[request] <= self._depth, f"request {request} has tokens after its client wants none")
        return super().take(outputs, now)

    def _open(self) -> list[int]:
        return [request for request in self._newest if request not in self.reasons]

    def _check_token(self, request: int, index: int, position: int, token: int) -> None:
        super()._check_token(request, index, position, token)
        expected = self._drawn.clients[request].token(request, index, position)
        law(token == expected, f"request {request}, sequence {index}: token {position} is {token}, not {expected}")

    def _check_end(self, end: End) -> None:
        super()._check_end(end)
        request = self.request_of(end.attempt)
        where = f"request {request}, sequence {end.index}"
        if end.reason in REFUSED:
            law(end.message and end.retry_after > 0, f"{where}: its refusal names no reason, or no time to come again")
            timed = self._drawn.clients[request].request.queue_timeout is not None
            law(timed or request not in self.moved, f"{where} is refused, though an engine had taken it")


def check_end(drawn: Drawn, run: Cluster, ledger: StrictLedger, serving: Serving) -> None:
    """Checks what must hold once a simulation is over. Raises LawBroken, and LedgerError for pages."""
    for request in range(len(drawn.clients)):
        _check_request(drawn, ledger, request)
    engines = [dict(zip(COLUMNS, row, strict=True))["engines"] for row in run.samples]
    law(max(engines) <= drawn.deployment.most, f"{max(engines)} engines serve, {drawn.deployment.most} may")
    law(serving.preemptions == sum(serving.preempted.values()), f"a preemption has no cause: {serving.preempted}")
    law(serving.preemptions >= 0 and serving.hits <= serving.queries, "more prefix tokens are found than looked up")
    for replica, engine in run.engines:
        check_idle(replica, engine)


def _check_request(drawn: Drawn, ledger: StrictLedger, request: int) -> None:
    one, reason = drawn.clients[request], ledger.reasons.get(request)
    tokens, whole = int(ledger.tokens[request]), one.request.count * one.output
    said = f"request {request} ended with {reason and reason.value} after {tokens} of {whole} tokens"
    law(reason is not None, f"request {request} has no end")
    law(tokens == sum(ledger.seen[request].values()), f"{said}; the ledger has another number than the client")
    law(tokens <= whole, said)
    ends_itself = EndReason.LENGTH if one.stops_at is None else EndReason.STOP
    leaves = one.leaves is not None or one.enough is not None or one.drops is not None
    if reason is ends_itself:
        law(tokens == whole or one.drops is not None, said)
    elif reason is EndReason.FINISHED:
        law(leaves, f"{said}, though its client stayed")
        law(request in ledger.cut or one.enough is None or tokens >= one.enough, f"{said}, too soon for its client")
    elif reason in REFUSED:
        may = drawn.impatient or one.request.queue_timeout is not None or one.request.deadline is not None
        law(may, f"{said}, though it could wait")
        law(tokens == 0 or request in ledger.moved, said)
    else:
        law(reason is EndReason.ENGINE_FAILED and drawn.abandons, said)


def check_idle(replica: Replica, engine: SimulatedEngine) -> None:
    """Checks an engine that lives, whose requests have all ended."""
    scheduler, name = engine.scheduler, f"engine {replica.number}"
    law(not scheduler.live_attempts(), f"{name} still has the attempts {scheduler.live_attempts()}")

    def take(outputs: StepOutputs) -> None:
        law(not len(outputs.attempts) and not outputs.ends, f"{name} reports more after the last end")
        replica.update(outputs)

    for _ in range(DRAIN_WAKES):
        if engine.due == math.inf:
            break
        engine.wake(engine.due, take)
    law(not scheduler.has_work and not scheduler.has_news, f"{name} still has work, or something to report")
    law(not scheduler.held, f"{name} still holds the attempts {list(scheduler.held)}")
    stats = scheduler.stats()
    law(not stats.pages_used, f"{name} has {stats.pages_used} pages that no sequence holds")
    law(not stats.running and not stats.waiting, f"{name} counts {stats.running} running, {stats.waiting} waiting")
    verify(scheduler.cache)
    law(not replica.waiting, f"the frontend takes attempts {list(replica.waiting)} to be at {name}")
    index = scheduler.cache.prefix.index
    if index.log is not None:
        there = {block_hash[:SHORT_HASH] for block_hash in index.hashes(index.all())}
        law(replica.hashes == there, f"the frontend knows {len(replica.hashes)} pages of {name}, it has {len(there)}")
