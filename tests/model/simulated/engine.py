"""Runs requests through the real scheduler over a simulated executor, step by step and without waiting."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cache_manager.block_hash import BlockHasher
from cache_manager.ledger import verify
from model.simulated.executor import SimulatedExecutor
from model.simulated.grammars import GrammarReadiness
from model.simulated.rows import SimulatedRows
from model.simulated.timeline import Timeline
from model.structured.grammar_store import GrammarStore
from scheduler.blueprint import Blueprint
from scheduler.events import EndReason, Submit
from scheduler.profile import read_profile
from scheduler.readiness import with_ready
from scheduler.request import Request
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from scheduler.step import StepPlan, StepResult

PROFILE = read_profile("llama-3.1-8b-h100")
Key = tuple[int, int]


@dataclass
class Clock:
    """A clock that a test moves. Steps are waited for by moving it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Outputs:
    """Output of each sequence, by attempt and index.

    Attributes:
        tokens: Token ids.
        logprobs: Logprobs of these.
        tops: Ids and logprobs of the alternatives of each.
        ends: How each ended.
        preemptions: How often a sequence lost its row.
    """

    tokens: dict[Key, list[int]] = field(default_factory=dict)
    logprobs: dict[Key, list[float]] = field(default_factory=dict)
    tops: dict[Key, list[dict[int, float]]] = field(default_factory=dict)
    ends: dict[Key, EndReason] = field(default_factory=dict)
    prompts: dict[int, dict[int, float]] = field(default_factory=dict)
    preemptions: int = 0


def run(
    requests: Sequence[Request],
    settings: SchedulerSettings | None = None,
    pages: int = 4096,
    emitted: Sequence[Sequence[int]] | None = None,
    mean: float = 256.0,
    executor: type[SimulatedExecutor] = SimulatedExecutor,
    grammars: GrammarStore | None = None,
) -> Outputs:
    """Runs requests to their ends, attempt i the i-th. emitted: output of each that an earlier engine delivered."""
    settings = settings or SchedulerSettings(max_batched_tokens=256, max_sequences=8, steps_in_flight=2)
    blueprint = replace(PROFILE.blueprint, settings=settings, queue=NO_QUEUE_LIMITS, pages=pages)
    return _run(blueprint, requests, emitted, mean, executor, grammars)


def _run(
    blueprint: Blueprint,
    requests: Sequence[Request],
    emitted: Sequence[Sequence[int]] | None,
    mean: float,
    executor: type[SimulatedExecutor],
    grammars: GrammarStore | None,
) -> Outputs:
    cache, clock = blueprint.cache(), Clock()
    scheduler = blueprint.scheduler(cache, BlockHasher(bytes(32), b"simulated", blueprint.layout.page_size))
    rows, ready = (
        SimulatedRows(blueprint.settings.max_sequences, mean, grammars),
        grammars and GrammarReadiness(grammars),
    )
    device = executor(rows, PROFILE.costs.faster(1e6), Timeline(clock))
    known = [()] * len(requests) if emitted is None else [(tuple(tokens),) if tokens else () for tokens in emitted]
    events: list[Submit] = [Submit(i, request, known[i]) for i, request in enumerate(requests)]
    found, flying = Outputs(), deque[StepPlan]()
    while events or scheduler.has_work or flying:
        clock.now += 1.0
        plan = scheduler.schedule(clock.now, with_ready(events, scheduler.held, ready) if ready else events)
        events = []
        if plan is not None:
            device.launch(plan)
            flying.append(plan)
        result: StepResult | None = None
        if flying and (plan is None or len(flying) >= blueprint.settings.depth):
            flying.popleft()
            result = device.collect()
        outputs = scheduler.commit(result, clock.now)
        verify(cache)
        for i, token in enumerate(outputs.tokens.tolist()):
            key = int(outputs.attempts[i]), int(outputs.indices[i])
            found.tokens.setdefault(key, []).append(token)
            found.logprobs.setdefault(key, []).append(float(outputs.logprobs.chosen[i]))
            top = zip(outputs.logprobs.top_ids[i].tolist(), outputs.logprobs.top[i].tolist(), strict=True)
            found.tops.setdefault(key, []).append(dict(top))
        for part in outputs.prompt_parts:
            places = range(part.start, part.start + len(part.logprobs.chosen))
            chosen = zip(places, part.logprobs.chosen.tolist(), strict=True)
            found.prompts.setdefault(part.attempt, {}).update(chosen)
        found.ends |= {(end.attempt, end.index): end.reason for end in outputs.ends}
        found.preemptions = scheduler.stats().preemptions
    return found
