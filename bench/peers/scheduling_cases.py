"""Cases for schedulers side by side: requests on a modelled machine, and the figures of each case.

All lengths, arrivals and costs are in the case. A scheduler sees of an output no more than its `max_tokens`.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from scheduler.profile import read_profile
from scheduler.step_costs import StepCosts

GPU = read_profile("llama-3.1-8b-h100").costs
CPU = StepCosts(fixed=0.02, decode=0.0003, context=2e-8, prefill=0.0008, pair=2e-8)
ROWS, BUDGET = 16, 512
ROOM = 2048  # pages: more than 16 of the requests need that are not about pages
MOST = 4096  # max_tokens of a request


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        arrives: Seconds.
        prompt: Tokens.
        output: Tokens after which the model stops.
        kind: Name in the figures.
        tenant: Name; a scheduler without tenants ignores it.
        priority: The lower, the more urgent.
        deadline: Seconds from its arrival at which its client leaves, as a scheduler may know.
        patience: Seconds from its arrival at which its client leaves, as no scheduler knows.
    """

    arrives: float
    prompt: int
    output: int
    kind: str = ""
    tenant: str = "one"
    priority: int = 0
    deadline: float = math.inf
    patience: float = math.inf

    @property
    def leaves(self) -> float:
        """Seconds on the clock at which its client leaves."""
        return self.arrives + min(self.deadline, self.patience)


@dataclass(slots=True)
class Outcome:
    """A case as a scheduler played it. Seconds are those of the virtual clock.

    Attributes:
        requests: Requests of the case; the mappings have their numbers.
        first: Seconds of each first token.
        ended: Seconds of each end. A request whose client leaves has none.
        drawn: Tokens of each output.
        gaps: Seconds between tokens, by kind.
        preemptions: Rows that gave way.
        computed: Tokens that were computed.
        again: Tokens among them that had been computed for the same request before.
        seconds: End of the last step.
    """

    requests: tuple[Asked, ...]
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    preemptions: int = 0
    computed: int = 0
    again: int = 0
    seconds: float = 0.0

    def waits(self, kind: str) -> list[float]:
        """Returns the seconds to the first token of each request of a kind; infinity where none came."""
        return [
            self.first.get(number, math.inf) - asked.arrives
            for number, asked in enumerate(self.requests)
            if asked.kind == kind
        ]

    def whole(self, kind: str, until: float = math.inf) -> int:
        """Returns the requests of a kind that had ended at a moment."""
        return sum(self.requests[number].kind == kind and at <= until for number, at in self.ended.items())


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a case.

    Attributes:
        name: Name, with its unit.
        of: Computes it.
        digits: Digits behind the point.
    """

    name: str
    of: Callable[[Outcome], float]
    digits: int = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, and what serves them.

    Attributes:
        name: Name in the table.
        requests: Requests in order of arrival.
        figures: Figures of it.
        chosen: Settings of Quire that are meant for such a case, beside its defaults.
        theirs: Those of vLLM's `SchedulerConfig`; none where it has none for such a case.
        rows: Sequences that run at once.
        budget: Tokens of a step.
        pages: Pages of 16 tokens.
        costs: Costs of a step.
    """

    name: str
    requests: tuple[Asked, ...]
    figures: tuple[Figure, ...]
    chosen: Mapping[str, str | float] = field(default_factory=dict)
    theirs: Mapping[str, str | float] = field(default_factory=dict)
    rows: int = ROWS
    budget: int = BUDGET
    pages: int = ROOM
    costs: StepCosts = GPU


def mean_wait(kind: str) -> Callable[[Outcome], float]:
    return lambda outcome: float(np.mean(outcome.waits(kind)))


def longest_wait(kind: str) -> Callable[[Outcome], float]:
    return lambda outcome: max(outcome.waits(kind))


def _paced(
    source: random.Random, rate: float, begins: float, ends: float, prompt: tuple[int, int], output: tuple[int, int]
) -> Iterator[tuple[float, int, int]]:
    """Yields arrival, prompt and output of requests of a Poisson process."""
    at = begins + source.expovariate(rate)
    while at < ends:
        yield at, source.randint(*prompt), source.randint(*output)
        at += source.expovariate(rate)


def _in_order(requests: Iterator[Asked]) -> tuple[Asked, ...]:
    return tuple(sorted(requests, key=lambda asked: asked.arrives))


SECONDS, STEADY = 20.0, 6.0


def overload(rate: float) -> Case:
    """Requests whose clients leave after 2 to 6 seconds. The machine serves about 19 a second."""
    source = random.Random(f"overload {rate}")
    paced = _paced(source, rate, 0.0, SECONDS, (100, 500), (50, 150))
    requests = _in_order(Asked(*one, deadline=source.uniform(2, 6)) for one in paced)
    figure = Figure("complete in time a second, of those that come after 6 s", _late_ones_in_time, 1)
    return Case(
        f"1 {rate:g} requests a second with deadlines",
        requests,
        (figure,),
        {"policy": "deadline"},
        {"max_num_queued_reqs": 48},
    )


def _late_ones_in_time(outcome: Outcome) -> float:
    """Leaves out the first seconds, in which no scheduler has a queue yet."""
    return sum(outcome.requests[number].arrives > STEADY for number in outcome.ended) / (SECONDS - STEADY)


TENANTS = (
    Figure("modest tenant: mean wait, s", mean_wait("modest")),
    Figure("modest tenant: longest wait, s", longest_wait("modest")),
)
FLOOD_SECONDS = 15


def _modest(source: random.Random) -> Iterator[Asked]:
    paced = _paced(source, 2.0, 1.0, FLOOD_SECONDS, (100, 300), (50, 150))
    return (Asked(*one, "modest", "modest") for one in paced)


def flood() -> Case:
    """A tenant that asks for twice as much as the machine serves, and one that asks for a tenth of it."""
    source = random.Random("flood")
    paced = _paced(source, 40.0, 0.0, FLOOD_SECONDS, (100, 500), (50, 150))
    requests = chain((Asked(*one, "flood", "flood") for one in paced), _modest(source))
    return Case("2 a flood of one tenant", _in_order(requests), TENANTS, {"policy": "fair"})


def cancels() -> Case:
    """A tenant that asks for 60 outputs each second, and leaves them 0.9 seconds later."""
    source = random.Random("cancels")
    storm = (
        Asked(float(second), source.randint(100, 500), source.randint(50, 150), "flood", "flood", patience=0.9)
        for second in range(FLOOD_SECONDS)
        for _ in range(60)
    )
    requests = _in_order(chain(storm, _modest(source)))
    return Case("2 a storm of cancels of one tenant", requests, TENANTS, {"policy": "fair"})


def giant() -> Case:
    """A prompt of 9,000 tokens that does not fit beside five others until some of these end, and small ones behind."""
    source = random.Random("giant")
    holders = [Asked(0.0, 1000, 300 + 100 * i, "holder") for i in range(5)]
    small = [Asked(1.0 + 0.1 * i, source.randint(50, 200), 50, "small") for i in range(60)]
    figures = (
        Figure("small ones: mean wait, s", mean_wait("small")),
        Figure("small ones: longest wait, s", longest_wait("small")),
        Figure("giant: wait, s", longest_wait("giant")),
    )
    requests = (*holders, Asked(0.5, 9000, 20, "giant"), *small)
    theirs = {"scheduler_reserve_full_isl": False}
    return Case("3 a giant prompt that does not fit", requests, figures, {"backfill_time": 0.0}, theirs, pages=800)


def storm(machine: str, costs: StepCosts, rate: float) -> Case:
    """60 outputs of 50 to 550 tokens, in a pool of half of what 16 of them need."""
    source = random.Random("storm")
    requests = tuple(Asked(i / rate, 48, source.randint(50, 550)) for i in range(60))
    figures = (
        Figure("preemptions", lambda outcome: outcome.preemptions, 0),
        Figure("tokens computed again", lambda outcome: outcome.again, 0),
        Figure("mean time to complete, s", _mean_time),
        Figure("until all are complete, s", lambda outcome: outcome.seconds, 1),
    )
    name = f"4 outputs that outgrow the pool, {machine}"
    chosen, theirs = {"schedule_conservativeness": 10.0}, {"watermark": 0.1}
    return Case(name, requests, figures, chosen, theirs, pages=160, costs=costs)


def _mean_time(outcome: Outcome) -> float:
    return float(np.mean([at - outcome.requests[number].arrives for number, at in outcome.ended.items()]))


URGENT_UNTIL = 25.0


def backlog() -> Case:
    """40 requests of priority 2, then for 24 seconds as many of priority 0 as the machine can serve."""
    source = random.Random("backlog")
    low = (Asked(0.0, 300, source.randint(200, 400), "low", priority=2) for _ in range(40))
    paced = _paced(source, 19.0, 1.0, URGENT_UNTIL, (100, 500), (50, 150))
    requests = _in_order(chain(low, (Asked(*one, "urgent") for one in paced)))
    figures = (
        Figure("urgent: mean wait of those of the first 2 s, s", _early_urgent),
        Figure("urgent: mean wait, s", mean_wait("urgent")),
        Figure("low: complete after 25 s, of 40", lambda outcome: outcome.whole("low", URGENT_UNTIL), 0),
        Figure("low: longest wait, s", longest_wait("low"), 1),
        Figure("tokens computed again", lambda outcome: outcome.again, 0),
    )
    return Case("5 a backlog of low priority", requests, figures, {"policy": "priority"}, {"policy": "priority"})


def _early_urgent(outcome: Outcome) -> float:
    early = [asked.kind == "urgent" and asked.arrives < 3 for asked in outcome.requests]
    return float(np.mean([outcome.first[n] - outcome.requests[n].arrives for n, one in enumerate(early) if one]))


def prompts(budget: int) -> Case:
    """16 streams, and prompts of 30,000 tokens beside them."""
    streams = [Asked(0.0, 100, 600, "stream") for _ in range(16)]
    giants = [Asked(1.0 + 3.0 * i, 30_000, 20, "giant") for i in range(2)]
    figures = (
        Figure("streams: longest time between tokens, ms", lambda outcome: 1e3 * max(outcome.gaps["stream"]), 0),
        Figure("streams: 99th percentile, ms", lambda outcome: 1e3 * np.percentile(outcome.gaps["stream"], 99), 0),
        Figure("giants: mean wait, s", mean_wait("giant")),
    )
    chosen, theirs = {"target_itl": 0.025}, {"long_prefill_token_threshold": 256}
    requests = (*streams, *giants)
    return Case(f"6 huge prompts, steps of {budget:,} tokens", requests, figures, chosen, theirs, 32, budget, 4500)


def cases() -> tuple[Case, ...]:
    """Returns all cases in the order of the table."""
    return (
        *(overload(rate) for rate in (15.0, 20.0, 95.0)),
        flood(),
        cancels(),
        giant(),
        storm("GPU", GPU, 40.0),
        storm("CPU", CPU, 4.0),
        backlog(),
        *(prompts(budget) for budget in (2048, 512)),
    )
