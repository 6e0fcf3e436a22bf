"""Preemption storms: long outputs in a pool much smaller than all of them together."""

from dataclasses import dataclass

import numpy as np

from cache_manager.block_hash import Scope
from cache_manager.manager import CacheManager
from scheduler.events import EndReason, EngineStats, Event, Submit
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan, StepResult
from scheduler.step_costs import StepWork
from tests.scheduler.executor import law, logprobs_of
from tests.scheduler.test_step_time import CPU, Machine
from tests.scheduler.workloads import PATIENT, make_layout, make_request

STOP = 7


@dataclass(frozen=True)
class Storm:
    """Requests of one prompt length, whose outputs end where the model stops.

    Attributes:
        outputs: Tokens of each request's output, the stop token included.
        turns: Turn in which each comes.
        rows: Rows.
        pages: Pages of 16 tokens.
        prompt: Prompt tokens.
        most: Output tokens that each may have.
        budget: Tokens of a step.
    """

    outputs: tuple[int, ...]
    turns: tuple[int, ...]
    rows: int = 32
    pages: int = 160
    prompt: int = 48
    most: int = 1024
    budget: int = 256

    @staticmethod
    def drawn(seed: int, count: int = 160, every: int = 4) -> "Storm":
        """A storm of outputs of 50 to 550 tokens, one of which comes every few turns."""
        outputs = np.random.default_rng(seed).integers(50, 550, count)
        return Storm(tuple(outputs.tolist()), tuple(every * i for i in range(count)))


def weather(storm: Storm, conservativeness: float, machine: Machine = CPU) -> tuple[EngineStats, float]:
    """Plays a storm on a modelled machine. Returns the stats at its end, and the seconds until then."""
    config = SchedulerSettings(
        max_batched_tokens=storm.budget,
        max_sequences=storm.rows,
        policy="first-come",
        backfill_time=0.0,
        schedule_conservativeness=conservativeness,
    )
    cache = CacheManager(make_layout(16), storm.pages, storm.rows)
    scheduler = Scheduler(config, PATIENT, cache)
    turn, now, stats, ended = 0, 0.0, EngineStats(), list[int]()
    while len(ended) < len(storm.outputs):
        law(turn < 100_000, "still at work")
        events: list[Event] = [
            Submit(i, make_request(i, storm.prompt, storm.most, (STOP,), scope=Scope("a")))
            for i, at in enumerate(storm.turns[: len(storm.outputs)])
            if at == turn
        ]
        plan = scheduler.schedule(now, events)
        law(plan is not None or not scheduler.has_work, "there is work, and none is begun")
        now += 0.02 if plan is None else machine.seconds(StepWork.of(plan.slices))
        outputs = scheduler.commit(None if plan is None else _drawn(storm, scheduler, plan), now)
        law(all(end.reason is EndReason.STOP for end in outputs.ends), "one ends otherwise than by its stop token")
        ended += [end.attempt for end in outputs.ends]
        stats, turn = outputs.stats, turn + 1
    return stats, now


def _drawn(storm: Storm, scheduler: Scheduler, plan: StepPlan) -> StepResult:
    rows, drawing = scheduler.rows, plan.logits[:, 1]
    # `length` counts the token that is drawn in this step.
    ends = rows.length[drawing] - storm.prompt >= np.array(storm.outputs)[rows.attempt[drawing]]
    tokens = np.where(ends, STOP, 1).astype(np.int32)
    return StepResult(plan.step, tokens, logprobs_of(tokens))
