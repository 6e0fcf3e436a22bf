"""A deployment on a virtual clock: engines, the router, the autoscaler and failover, as `quire serve` has them.

An event at a time: an arrival, the end of an engine's step, a fault, a look of the autoscaler. Events of one moment
come in the order in which they were made, so two simulations of one traffic with one seed are equal, on any machine.

The way of requests and tokens between client, frontend and engine takes no time. An engine's end is noticed
`failover` seconds later, when its requests go on elsewhere with the tokens that they have. Engines that the autoscaler
ends hand theirs over at once.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHasher
from model.simulated.faults import Fault
from rpc.frontend.engine_client import EngineInfo
from rpc.frontend.replicas import Replica
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.slo import SLOTracker
from rpc.simulation.deployment import Deployment
from rpc.simulation.engine import SECRET, Draws, Ints, SimulatedEngine
from rpc.simulation.routers import ROUTERS
from rpc.simulation.served import Ledger, Serving, summed
from rpc.simulation.traffic import Timed
from scheduler.autoscaling import Autoscaler, EngineLoad
from scheduler.events import SHORT_HASH, Abort, EndReason, EngineStats, StepOutputs, Submit
from scheduler.limits import Limits
from scheduler.preemption_cause import PreemptionCause
from scheduler.request import Request
from scheduler.rows import Rows
from scheduler.stand_ins import FILLER

LOOK_SECONDS = 1.0  # between two looks of the autoscaler, as of `rpc.engines.scaling`
NEVER = 2**62  # tokens
PARKED_SECONDS = FrontendSettings().failover  # that requests wait while there is no engine
SAMPLES = 400  # of the deployment's state, over the time of the arrivals
COLUMNS = ("seconds", "engines", "running", "waiting", "pages in use", "preemptions", "prefix hits")


@dataclass(slots=True, eq=False)
class _Node:
    """An engine in its place.

    Attributes:
        replica: As the frontend knows it.
        engine: None while it starts.
        since: Seconds at which it began to start.
        ended: Whether it is gone.
        dead_since: When it died, which is not noticed yet; None for one that lives.
        woken: The time for which it was last entered in the queue of events.
        submits: Its open attempts.
    """

    replica: Replica
    since: float
    engine: SimulatedEngine | None = None
    ended: bool = False
    dead_since: float | None = None
    woken: float = math.inf
    submits: dict[int, Submit] = field(default_factory=dict)


class _Look:
    """Something that is done at regular times.

    Attributes:
        due: Seconds at which it is done next.
    """

    def __init__(self, begin: float, seconds: float, look: Callable[[float], None], often: int = 0) -> None:
        """often: times after which it is done half as often from then on, again and again; 0 for never."""
        self.due, self._seconds, self._look = begin + seconds, seconds, look
        self._often, self._done = often, 0

    def do(self) -> None:
        self._look(self.due)
        self._done += 1
        if self._often and self._done % self._often == 0:
            self._seconds *= 2
        self.due += self._seconds


def fillers(ledger: Ledger) -> Draws:  # noqa: ARG001
    """Returns what draws the same token for all rows: outputs end at their length."""
    tokens = np.empty(0, np.int32)

    def fill(rows: Rows, drawing: NDArray[np.intp]) -> Ints:  # noqa: ARG001
        nonlocal tokens
        if len(tokens) != len(drawing):
            tokens = np.full(len(drawing), FILLER, np.int32)
        return tokens

    return fill


def _with_time_left(request: Request, age: float, served: bool) -> Request:
    """Returns a request for another engine, as `rpc.frontend.dispatch` sends it.

    Args:
        request: The request as it came.
        age: Seconds since then.
        served: An engine has begun with it, so that its time in the queue is over.
    """
    if request.deadline is not None:
        request = replace(request, deadline=max(0.0, request.deadline - age))
    if request.queue_timeout is not None:
        request = replace(request, queue_timeout=None if served else max(0.0, request.queue_timeout - age))
    return request


class Cluster:
    """One simulation.

    Attributes:
        ledger: Of the requests.
        samples: State over time, rows of `COLUMNS`. The last two are sums since the start.
    """

    def __init__(
        self,
        deployment: Deployment,
        traffic: Sequence[Timed],
        draws_of: Callable[[Ledger], Draws] = fillers,
        held: Mapping[int, float] | None = None,
        stops: Mapping[int, int] | None = None,
    ) -> None:
        """Makes a simulation.

        Args:
            deployment: What is simulated.
            traffic: Events of clients. Requests have numbers from 0 on, which are the numbers of their attempts.
            draws_of: Makes what draws tokens, for the ledger.
            held: Seconds until a request may be admitted after an engine has got it first; 0 for others.
            stops: Tokens after which a request's client ends it, as at a stop string.

        Raises:
            ValueError: A request is longer than what an engine's pages hold.
        """
        deployment.check_lengths(traffic)
        self._deployment = deployment
        self.ledger = Ledger(1 + max((one.request for one in traffic), default=-1))
        self._draws = draws_of(self.ledger)
        self._held = dict(held or {})
        self._any_stops, self._stops = bool(stops), np.full(len(self.ledger.came), NEVER)
        for request, tokens in (stops or {}).items():
            self._stops[request] = tokens
        self._asked: dict[int, Submit] = {}  # requests as they came first
        self._served = set[int]()  # requests with which an engine has begun
        self.samples: list[tuple[float, ...]] = []
        self._random = random.Random(deployment.seed)  # noqa: S311 - it hides nothing
        made, many = deployment.blueprint, deployment.most > 1
        page_size = made.layout.page_size
        limits = Limits(vocabulary=2**31, context=2**31, pool_tokens=2**31, sequences=made.settings.max_sequences)
        info = EngineInfo(limits, made.pages, "", "", page_size)
        self._route = ROUTERS[deployment.router](self._random, info)
        hashes = many and deployment.router == "cost" and deployment.blueprint.prefix_cache
        self._hasher = BlockHasher(SECRET, b"", page_size) if hashes else None
        self._autoscaler = Autoscaler(deployment.scaling, deployment.replicas)
        self._slo = SLOTracker(deployment.scaling.ttft, deployment.scaling.itl)
        self._slo_counts = deployment.scaling.ttft is not None or deployment.scaling.itl is not None
        self._nodes: list[_Node] = []
        self._serving: list[_Node] | None = None
        self._place: dict[int, _Node] = {}  # of each open attempt
        self._attempt: dict[int, int] = {}  # of each request, the newest
        self._homeless: list[tuple[int, Submit]] = []
        self._gone: list[tuple[EngineStats, float, float]] = []  # of ended engines: stats, busy and lived seconds
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._made = 0
        self._traffic = traffic
        self._coming = len(traffic)
        self._open_requests: set[int] = set()

    def run(self) -> Serving:
        """Serves the traffic to its end. Returns how.

        Raises:
            RuntimeError: Requests are left, and nothing can happen any more: a bug of the simulation.
        """
        begin = min((one.at for one in self._traffic), default=0.0)
        end = max((one.at for one in self._traffic), default=0.0)
        for number in range(self._deployment.replicas):
            self._open(self._new(number, begin), begin)
        for one in self._traffic:
            self._at(one.at, self._arrival(one))
        for fault in self._deployment.faults:
            self._at(begin + fault.at, self._fault(fault))
        looks = [_Look(begin, max((end - begin) / SAMPLES, LOOK_SECONDS / 10), self._sample, 2 * SAMPLES)]
        if self._deployment.most > self._deployment.replicas:
            looks.append(_Look(begin, LOOK_SECONDS, self._scale))
        now, due = begin, min(one.due for one in looks)
        while self._coming or self._open_requests:
            if not self._events:
                raise RuntimeError(f"nothing happens any more, and requests {sorted(self._open_requests)} are open")
            if due <= self._events[0][0]:
                min(looks, key=lambda one: one.due).do()
                due = min(one.due for one in looks)
                continue
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        self._sample(now)
        return self._summary(begin, now)

    @property
    def engines(self) -> list[tuple[Replica, SimulatedEngine]]:
        """Engines that live and take requests: each as the frontend knows it, and itself."""
        alive = (node for node in self._serving_nodes() if node.dead_since is None)
        return [(node.replica, node.engine) for node in alive if node.engine is not None]

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._made += 1
        heapq.heappush(self._events, (when, self._made, happen))

    # Engines

    def _new(self, number: int, now: float) -> _Node:
        """Enters an engine that begins to start."""
        node = _Node(Replica(number), now)
        self._nodes.append(node)
        return node

    def _open(self, node: _Node, now: float) -> None:
        """Lets an engine serve."""
        made, costs = self._deployment.blueprint, self._deployment.costs
        node.engine = SimulatedEngine(made, costs, self._draws, self._hasher is not None, self._ready_after)
        self._serving = None
        homeless, self._homeless = self._homeless, []
        for request, submit in homeless:
            self._send(request, submit, now)

    def _ready_after(self, attempt: int) -> float:
        return self._held.pop(self.ledger.request_of(attempt), 0.0)

    def _serving_nodes(self) -> list[_Node]:
        """Returns the nodes that take requests. Listed anew where one has come or gone: each request asks."""
        if self._serving is None:
            self._serving = [node for node in self._nodes if node.engine is not None]
        return self._serving

    def _end(self, node: _Node, now: float) -> list[Submit]:
        """Ends an engine. Returns the attempts that it leaves, as they were submitted."""
        node.ended = True
        self._nodes.remove(node)
        self._serving = None
        busy = 0.0 if node.engine is None else node.engine.busy_until(node.dead_since or now)
        self._gone.append((node.replica.stats, busy, (node.dead_since or now) - node.since))
        return [submit for attempt, submit in node.submits.items() if self._place.pop(attempt, None) is not None]

    def _go_on(self, left: Sequence[Submit], now: float) -> None:
        """Submits the requests of an engine that is gone to others, with the tokens that they have."""
        for number in [self.ledger.request_of(submit.attempt) for submit in left]:
            asked, emitted = self._asked[number], self._asked[number].emitted
            if asked.request.count > 1:  # it begins anew: which tokens are whose is not booked
                self.ledger.tokens[number] = 0
            elif have := sum(len(tokens or ()) for tokens in emitted) + int(self.ledger.tokens[number]):
                emitted = ((FILLER,) * have,)
            attempt = self.ledger.again(number)
            self._send(number, replace(asked, attempt=attempt, emitted=emitted, again=True), now)

    def _due(self, node: _Node) -> None:
        """Enters an engine's next moment among the events, where it is not there yet."""
        engine = node.engine
        if engine is not None and engine.due < math.inf and engine.due != node.woken:
            node.woken = engine.due
            self._at(engine.due, partial(self._wake, node))

    def _wake(self, node: _Node, now: float) -> None:
        engine = node.engine
        if node.ended or node.dead_since is not None or engine is None or engine.due != now:
            return  # it is gone, or something came before
        node.woken = math.inf
        engine.wake(now, partial(self._take, node, now))
        self._due(node)

    def _take(self, node: _Node, now: float, outputs: StepOutputs) -> None:
        node.replica.update(outputs)
        firsts, gaps = self.ledger.take(outputs, now)
        if self._slo_counts:
            self._slo.observe(firsts.tolist(), _counted(gaps))
        self._served.update(self.ledger.request_of(start.attempt) for start in outputs.starts)
        for attempt in outputs.over:
            node.submits.pop(attempt, None)
            if self._place.pop(attempt, None) is not None:
                self._open_requests.discard(self.ledger.request_of(attempt))
        if self._any_stops and node.engine is not None:
            requests = self.ledger.requests_of(outputs.attempts)
            for attempt in outputs.attempts[self.ledger.tokens[requests] >= self._stops[requests]].tolist():
                node.engine.put(Abort(attempt), now)

    # Clients

    def _arrival(self, one: Timed) -> Callable[[float], None]:
        def happen(now: float) -> None:
            self._coming -= 1
            if isinstance(one.event, Submit):
                self._open_requests.add(one.request)
                self._asked[one.request] = one.event
                self.ledger.arrive(one.request, now, one.event.request.count)
                self._send(one.request, one.event, now)
            elif isinstance(one.event, Abort) and one.request in self._open_requests:
                self._leave(one.request, one.event.index, now)

        return happen

    def _leave(self, request: int, index: int | None, now: float) -> None:
        """Ends a request whose client leaves, or one of its sequences."""
        if index is None:
            self.ledger.cut.add(request)
        attempt = self._attempt.get(request, -1)
        if (node := self._place.get(attempt)) is not None and node.engine is not None:
            node.engine.put(Abort(attempt, index), now)
            self._due(node)
        elif index is None and any(one == request for one, _ in self._homeless):
            self._homeless = [(one, submit) for one, submit in self._homeless if one != request]
            self._close(request, EndReason.FINISHED)

    def _close(self, request: int, reason: EndReason) -> None:
        """Ends a request that no engine has."""
        self.ledger.reasons[request] = reason
        self._open_requests.discard(request)

    def _give_up(self, request: int, submit: Submit, reason: EndReason, now: float) -> None:  # noqa: ARG002
        if (request, submit) in self._homeless:
            self._homeless.remove((request, submit))
            self._close(request, reason)

    def _send(self, request: int, submit: Submit, now: float) -> None:
        """Sends a request to an engine, or keeps it for a time until there is one."""
        # Its client left while its engine was dead, or had enough when it died.
        if request in self.ledger.cut or self.ledger.tokens[request] >= self._stops[request]:
            self._close(request, EndReason.FINISHED)
            return
        nodes = self._serving_nodes()
        age, served = now - float(self.ledger.came[request]), request in self._served
        submit = replace(submit, request=_with_time_left(self._asked[request].request, age, served))
        if not nodes:
            self._homeless.append((request, submit))
            timeout = math.inf if submit.request.queue_timeout is None else submit.request.queue_timeout
            reason = EndReason.QUEUE_TIMEOUT if timeout < PARKED_SECONDS else EndReason.ENGINE_FAILED
            self._at(now + min(timeout, PARKED_SECONDS), partial(self._give_up, request, submit, reason))
            return
        node = nodes[0] if len(nodes) == 1 else self._choose(nodes, submit)
        node.replica.attempt_sent(submit.attempt, _length(submit))
        node.submits[submit.attempt] = submit
        self._place[submit.attempt], self._attempt[request] = node, submit.attempt
        if node.engine is not None:
            node.engine.put(submit, now)
        self._due(node)

    def _choose(self, nodes: Sequence[_Node], submit: Submit) -> _Node:
        replicas = [node.replica for node in nodes]
        chosen = self._route(replicas, self._hashes(submit), _length(submit))
        return nodes[replicas.index(chosen)]

    def _hashes(self, submit: Submit) -> list[bytes]:
        if self._hasher is None:
            return []
        chain = self._hasher.chain(submit.request.scope)
        chain.extend(submit.request.prompt)
        return [block_hash[:SHORT_HASH] for block_hash in chain.hashes]

    # Faults, and the number of engines

    def _fault(self, fault: Fault) -> Callable[[float], None]:
        def happen(now: float) -> None:
            node = next((node for node in self._serving_nodes() if node.replica.number == fault.engine), None)
            if node is None or node.engine is None or node.dead_since is not None:
                return
            if fault.kind == "kill":
                node.dead_since = now
                self._at(now + self._deployment.failover, partial(self._noticed, node))
                return
            slowed = node.engine.slowed
            slowed.append(fault.factor)
            self._at(now + fault.seconds, lambda _: slowed.remove(fault.factor))

        return happen

    def _noticed(self, node: _Node, now: float) -> None:
        """Has the requests of a dead engine go on elsewhere, and another one start in its place."""
        if node.ended:
            return
        left, successor = self._end(node, now), self._new(node.replica.number, now)
        self._at(now + self._deployment.start, partial(self._started, successor))
        self._go_on(left, now)

    def _started(self, node: _Node, now: float) -> None:
        if not node.ended:
            self._open(node, now)

    def _scale(self, now: float) -> None:
        decision = self._autoscaler.decide(self._load(now))
        for _ in range(len(self._nodes), decision.replicas):
            taken = {node.replica.number for node in self._nodes}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            node = self._new(number, now)
            self._at(now + self._deployment.start, partial(self._started, node))
        for _ in range(decision.replicas, len(self._nodes)):
            # One that does not serve yet ends first, else the least loaded one, whose requests go on elsewhere.
            least = min(self._nodes, key=_load_of)
            if least.engine is None or len(self._serving_nodes()) > 1:
                self._go_on(self._end(least, now), now)

    def _load(self, now: float) -> EngineLoad:
        serving = self._serving_nodes()
        made = self._deployment.blueprint
        use = [
            max(node.replica.stats.pages_used / made.pages, node.replica.stats.running / made.settings.max_sequences)
            for node in serving
        ]
        return EngineLoad(
            now,
            len(serving),
            len(self._nodes) - len(serving),
            sum(node.replica.stats.waiting_seconds for node in serving),
            sum(use) / max(len(use), 1),
            self._slo.late(),
        )

    # Figures

    def _stats(self) -> Iterator[EngineStats]:
        """Yields the last stats of each engine that there was."""
        yield from (stats for stats, _, _ in self._gone)
        yield from (node.replica.stats for node in self._nodes)

    def _sample(self, now: float) -> None:
        serving = [node.replica.stats for node in self._serving_nodes()]
        pages = sum(one.pages_used for one in serving) / max(1, sum(one.pages_total for one in serving))
        preemptions, hits, queries = self._counts()
        self.samples.append(
            (
                now,
                len(serving),
                sum(one.running for one in serving),
                sum(one.waiting for one in serving) + len(self._homeless),
                pages,
                preemptions,
                hits / max(1, queries),
            )
        )

    def _counts(self) -> tuple[int, int, int]:
        return summed((one.preemptions, one.prefix_hits, one.prefix_queries) for one in self._stats())

    def _summary(self, begin: float, end: float) -> Serving:
        there = [node for node in self._nodes if node.engine is not None]
        busy = sum(node.engine.busy_until(node.dead_since or end) for node in there if node.engine) + sum(
            one for _, one, _ in self._gone
        )
        lived = sum(end - node.since for node in there) + sum(one for _, _, one in self._gone)
        preempted = Counter[PreemptionCause]()
        for one in self._stats():
            preempted.update(one.preempted)
        return Serving(self.ledger, end - begin, *self._counts(), busy, lived, preempted)


def _length(submit: Submit) -> int:
    """Returns the tokens of a request, those that it has drawn before included."""
    return len(submit.request.prompt) + max((len(tokens or ()) for tokens in submit.emitted), default=0)


def _load_of(node: _Node) -> tuple[bool, int, int]:
    stats = node.replica.stats
    return node.engine is not None, stats.running + stats.waiting, -node.replica.number


def _counted(gaps: NDArray[np.float64]) -> Mapping[float, int]:
    values, counts = np.unique(gaps, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
