"""Checks of recordings that are kept as tests: `quire replay FILE --excerpt tests/simulation/recordings/NAME.rec`.

The scheduler of today may decide otherwise than the one that was recorded. So what is checked are laws, on two ways:
through the recorded calls, as long as the plans are the recorded ones, and through a simulation of the requests that
came until then.
"""

from dataclasses import replace

from cache_manager.ledger import verify
from rpc.simulation.cluster import Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.recorded import Trace, recorded_draws, recorded_holds, recorded_stops, recorded_traffic
from scheduler.replaying import Recording, Replay
from tests.scheduler.executor import law
from tests.simulation.laws import OrderedLedger, check_idle


def check_calls(recording: Recording) -> Recording:
    """Replays a recording under the laws. Returns what of it has plans that today's scheduler makes too.

    Raises:
        LawBroken: A law does not hold, or today's scheduler raises an exception; LedgerError for pages.
    """
    replay, settings, alike = Replay(recording), recording.blueprint.settings, 0
    for call in replay:
        alike += 1
        verify(replay.scheduler.cache)
        if call.plan is not None:
            computed = int(call.plan.slices[:, 2].sum())
            law(computed <= settings.max_batched_tokens, f"step {call.plan.step} computes {computed} tokens")
    law(replay.raised is None, f"the scheduler still raises {replay.raised!r}")
    found = replay.difference
    law(found is None or found.name != "raised" or found.replayed is None, f"the scheduler raises: {found}")
    calls = [line for line in recording.lines if line]
    return replace(recording, lines=calls[:alike])


def check_simulated(recording: Recording) -> OrderedLedger:
    """Serves the requests of a recording with today's scheduler under the laws, on a simulated engine.

    Raises:
        LawBroken: A law does not hold; LedgerError for pages.
    """
    trace = Trace.of(recording)
    deployment, ledger = Deployment(trace.blueprint, trace.costs), OrderedLedger(len(trace.requests))
    draws = recorded_draws(trace)(ledger)
    traffic = recorded_traffic(trace, deployment.longest)
    run = Cluster(deployment, traffic, lambda _: draws, recorded_holds(trace), recorded_stops(trace))
    run.ledger = ledger
    run.run()
    law(trace.requests, "today's scheduler decides otherwise before the first request: record it again, or remove it")
    for number, one in trace.requests.items():
        law(number in ledger.reasons, f"request {number} has no end")
        late = trace.blueprint.settings.depth * one.submit.request.count
        law(not one.stops or ledger.tokens[number] <= len(one.tokens) + late, f"request {number} is not ended in time")
    for replica, engine in run.engines:
        check_idle(replica, engine)
    return ledger
