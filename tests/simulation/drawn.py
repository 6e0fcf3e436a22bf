"""A small deployment, its faults and its clients, drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import DEFAULT_TENANT, Scope
from cache_manager.layout import KVLayout
from cache_manager.policies import POLICIES
from model.simulated.faults import KILL, SLOW, Fault
from rpc.simulation.cluster import PARKED_SECONDS, Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.engine import Draws, Ints
from rpc.simulation.routers import ROUTERS
from rpc.simulation.served import Ledger
from rpc.simulation.traffic import CONTROLS, Timed
from scheduler.blueprint import Blueprint
from scheduler.controls import LogitsParams
from scheduler.events import Abort, Submit
from scheduler.request import Request
from scheduler.rows import Rows
from scheduler.scaling_settings import ScalingSettings
from scheduler.settings import SCHEDULING_POLICIES, QueueLimits, SchedulerSettings
from scheduler.step_costs import StepCosts

ARRIVALS_SECONDS = 3.0  # in which all requests come
COSTS = StepCosts(0.15, 0.002, 1e-4, 1e-3, 0.0)
LAYOUT = KVLayout.uniform(((0,),), kv_heads=1, head_dim=8, element_bytes=2, page_size=4)
PATIENT = QueueLimits(requests=1000, pools_of_tokens=1e9, wait=1e9, tenant_share=1.0)
IMPATIENT = QueueLimits(requests=1, pools_of_tokens=0.5, wait=0.6)
STOP = 2  # token that ends the outputs that are to stop
GRAMMAR = replace(CONTROLS, logits_params=LogitsParams(grammar="x"))


def token(request: int, index: int, position: int) -> int:
    """Returns the token of a request's sequence at a position of its output, above that of a stop."""
    return 3 + (7919 * request + 104729 * index + 31 * position) % 1000


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """A request and what its client does.

    Attributes:
        at: Seconds at which it comes.
        request: The request.
        stops_at: Position at which each sequence draws the stop token; None for none.
        enough: Tokens after which its client ends it; None for none.
        leaves: Seconds at which its client leaves; None for none.
        drops: Seconds at which its client leaves its first sequence; None for none.
        held: Seconds for which its grammar is compiled; 0 without one.
    """

    at: float
    request: Request
    stops_at: int | None = None
    enough: int | None = None
    leaves: float | None = None
    drops: float | None = None
    held: float = 0.0

    @property
    def output(self) -> int:
        """Tokens of each sequence that is drawn to its end."""
        return self.request.max_tokens if self.stops_at is None else self.stops_at + 1

    def token(self, number: int, index: int, position: int) -> int:
        return STOP if position == self.stops_at else token(number, index, position)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Deployment and clients that a seed stands for.

    Attributes:
        deployment: Engines, router, faults.
        clients: By number of their request.
    """

    deployment: Deployment
    clients: list[Client] = field(default_factory=list)

    @property
    def impatient(self) -> bool:
        """Whether engines may refuse any request."""
        return self.deployment.blueprint.queue != PATIENT

    @property
    def abandons(self) -> bool:
        """Whether requests may find no engine for as long as they wait for one."""
        return self.deployment.start >= PARKED_SECONDS / 2

    def cluster(self, ledger: Ledger) -> Cluster:
        """Returns the simulation, which books in this ledger."""
        run = Cluster(
            self.deployment,
            [event for number, one in enumerate(self.clients) for event in _events(number, one)],
            self._draws(ledger),
            {number: one.held for number, one in enumerate(self.clients) if one.held},
            {number: one.enough for number, one in enumerate(self.clients) if one.enough is not None},
        )
        run.ledger = ledger
        return run

    def _draws(self, ledger: Ledger) -> Callable[[Ledger], Draws]:
        def draws(rows: Rows, drawing: NDArray[np.intp]) -> Ints:
            positions = rows.length[drawing] - rows.prompt[drawing] - 1
            each = zip(rows.attempt[drawing].tolist(), rows.index[drawing].tolist(), positions.tolist(), strict=True)
            numbered = ((ledger.request_of(attempt), index, position) for attempt, index, position in each)
            return np.array([self.clients[one[0]].token(*one) for one in numbered], np.int32)

        return lambda _: draws


def _events(number: int, one: Client) -> list[Timed]:
    events = [Timed(one.at, number, Submit(number, one.request))]
    if one.drops is not None:
        events.append(Timed(one.drops, number, Abort(number, 0)))
    if one.leaves is not None:
        events.append(Timed(one.leaves, number, Abort(number)))
    return events


def draw(seed: int) -> Drawn:
    """Returns what a seed stands for."""
    rng = Random(seed)
    deployment = _deployment(rng)
    most = deployment.blueprint.settings.max_sequences
    stems = [[rng.randrange(3, 1000) for _ in range(20)] for _ in range(3)]
    return Drawn(deployment, [_client(rng, stems, most) for _ in range(rng.randint(3, 9))])


def _deployment(rng: Random) -> Deployment:
    settings = SchedulerSettings(
        max_batched_tokens=rng.choice((8, 16, 64)),
        max_sequences=rng.choice((2, 3, 8)),
        steps_in_flight=rng.choice((1, 2)),
        policy=rng.choice(SCHEDULING_POLICIES),
    )
    queue = IMPATIENT if rng.random() < 0.3 else PATIENT
    pages, eviction = rng.choice((10, 12, 40)), rng.choice(sorted(POLICIES))
    blueprint = Blueprint(settings, queue, LAYOUT, pages, eviction, prefix_cache=rng.random() < 0.8)
    replicas = rng.randint(2, 4)
    scaling = ScalingSettings(
        replicas=rng.choice((None, replicas + 1)),
        queue=rng.choice((0.1, 1.0)),
        ttft=rng.choice((None, 0.3)),
        up=rng.choice((0.0, 1.0)),
        down=1.0,
    )
    faults = tuple(
        Fault(
            rng.uniform(0, ARRIVALS_SECONDS + 2),
            rng.choice((KILL, SLOW)),
            rng.randrange(replicas + 1),
            rng.uniform(0, 2),
            rng.uniform(0.5, 4),
        )
        for _ in range(rng.choice((0, 1, 2, 4, 8)))
    )
    start = rng.choice((0.0, 0.5, 2.0, 2.0, PARKED_SECONDS + 10))
    failover = rng.choice((0.0, 0.3, 1.0))
    router = rng.choice(sorted(ROUTERS))
    return Deployment(blueprint, COSTS, replicas, scaling, router, start, failover, faults, rng.randrange(100))


def _client(rng: Random, stems: list[list[int]], most: int) -> Client:
    stem = rng.choice(stems)[: rng.choice((0, 4, 12, 20))]
    prompt = [*stem, *(rng.randrange(3, 1000) for _ in range(rng.randint(1, 15)))]
    output, at = rng.randint(1, 6), rng.choice((0.0, 0.0, 1.0, rng.uniform(0, ARRIVALS_SECONDS)))
    deadline = rng.uniform(0.1, 4) if rng.random() < 0.2 else None
    leaves = at + rng.uniform(0, 3) if rng.random() < 0.2 else None
    count = rng.randint(2, min(3, most)) if rng.random() < 0.15 else 1
    grammar = rng.random() < 0.1
    request = Request(
        np.array(prompt, np.int32),
        output,
        (STOP,),
        GRAMMAR if grammar else CONTROLS,
        queue_timeout=rng.uniform(0.1, 3) if rng.random() < 0.1 else None,
        scope=Scope(tenant=rng.choice((DEFAULT_TENANT, DEFAULT_TENANT, "a", "b"))),
        count=count,
        priority=rng.randrange(3),
        deadline=deadline,
    )
    return Client(
        at,
        request,
        rng.randrange(output) if rng.random() < 0.2 else None,
        rng.randint(1, output) if count == 1 and rng.random() < 0.15 else None,
        at + deadline if deadline is not None else leaves,
        at + rng.uniform(0, 1) if count > 1 and rng.random() < 0.5 else None,
        rng.uniform(0, 1) if grammar else 0.0,
    )
