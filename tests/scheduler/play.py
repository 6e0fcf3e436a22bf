"""Plays a workload through any scheduler and executor: with drafts, another policy, a host tier, pages that come.

These may decide otherwise than `SchedulerDriver` checks which sequences are admitted and delayed in a turn.
"""

from collections.abc import Callable

from cache_manager.ledger import verify
from scheduler.scheduler import Scheduler
from tests.scheduler.executor import FakeExecutor, law
from tests.scheduler.outcome import Outcome, check_outcome
from tests.scheduler.workloads import Workload


def play(
    workload: Workload,
    scheduler: Scheduler,
    executor: FakeExecutor,
    patience: int = 1,
    after_turn: Callable[[], None] = lambda: None,
) -> list[int]:
    """Runs a workload to its end, as the engine's loop does; a turn takes a second.

    `FakeExecutor` checks each plan, `Outcome` each output, and the ledger is verified after each turn.

    Args:
        workload: Arrivals, cancels, eager turns and depth.
        scheduler: Scheduler of the workload's settings.
        executor: Executes the plans.
        patience: Turns that it may take, as a multiple of the workload's `most_turns`.
        after_turn: Called after each turn, for laws of the caller's own.

    Returns:
        Attempts in the order of their starts; one that starts again is here again.
    """
    outcomes = {arrival.attempt: Outcome(arrival) for arrival in workload.arrivals}
    in_flight, turn, started = 0, 0, list[int]()
    while turn <= workload.last_turn or scheduler.has_work or scheduler.has_news:
        law(turn < patience * workload.most_turns, f"still at work after {turn} turns")
        now, events = float(turn), workload.events(turn)
        plan = scheduler.schedule(now, events)
        if plan is not None:
            executor.launch(plan)
            in_flight += 1
        outputs = None
        if workload.collects(turn, plan, in_flight):
            in_flight -= 1
            outputs = scheduler.commit(executor.collect(), now)
        elif events or scheduler.has_news:
            outputs = scheduler.commit(None, now)
        if outputs is not None:
            for start in outputs.starts:
                outcomes[start.attempt].age = start.age
                started.append(start.attempt)
            for i, attempt in enumerate(outputs.attempts.tolist()):
                outcomes[attempt].take_token(outputs, i)
            for end in outputs.ends:
                outcomes[end.attempt].take_end(end)
        verify(scheduler.cache)
        after_turn()
        turn += 1
    for outcome in outcomes.values():
        check_outcome(outcome, workload)
    law(scheduler.cache.pool.free == scheduler.cache.pool.total, "pages are held by no sequence")
    return started
