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

OLD = "what it was kept for cannot be told any more. Record it again, or remove it"
OUTPUTS = 100  # outputs of a simulation for each recorded step, at most: it may preempt, and it looks at idle engines


def check_calls(recording: Recording) -> Recording:
    """Replays a recording under the laws. Returns what of it has plans that today's scheduler makes too.

    Raises:
        LawBroken: A law does not hold, today's scheduler raises an exception, or it decides otherwise before it comes
            to the call in which the recorded one raised one; LedgerError for pages.
    """
    replay, most, alike = Replay(recording), recording.blueprint.settings.step_tokens, 0
    for call in replay:
        alike += 1
        verify(replay.scheduler.cache)
        if call.plan is not None:
            computed = int(call.plan.slices[:, 2].sum())
            law(computed <= most, f"step {call.plan.step} computes {computed} tokens")
    law(replay.raised is None, f"the scheduler still raises {replay.raised!r}")
    calls, found = [line for line in recording.lines if line], replay.difference
    if found is not None:
        law(found.name != "raised" or found.replayed is None, f"the scheduler raises: {found}")
        failed = '"raised"' in calls[-1] and alike < len(calls) - 1
        law(not failed, f"step {found.step} is another one today, before the call that raised an exception: {OLD}")
    return replace(recording, lines=calls[:alike])


def check_kept(recording: Recording) -> OrderedLedger | None:
    """Checks a recording by both ways. Returns how its requests were served; None for searches, which are replayed.

    Raises:
        LawBroken: A law does not hold, or more than half of the calls with requests (of all calls where none comes)
            come after the first plan that is another one today.
    """
    alike = check_calls(recording)
    what = '"submit"' if any('"submit"' in line for line in recording.lines) else "{"  # of requests, else of calls
    left, whole = (sum(what in line for line in one.lines) for one in (alike, recording))
    law(2 * left >= whole, f"{whole - left} of {whole} calls come after a plan that is another today: {OLD}")
    if any('"beam"' in line for line in alike.lines):
        return None
    return check_simulated(Trace.of(alike))


def check_simulated(trace: Trace) -> OrderedLedger:
    """Serves the requests of a recording with today's scheduler under the laws, on a simulated engine.

    Raises:
        LawBroken: A law does not hold; LedgerError for pages.
    """
    deployment, ledger = Deployment(trace.blueprint, trace.costs), OrderedLedger(len(trace.requests))
    ledger.most_outputs = OUTPUTS * (len(trace.steps) + 100)
    for number, one in trace.requests.items():  # those that resume come with tokens
        ledger.seen[number].update({i: len(tokens or ()) for i, tokens in enumerate(one.submit.emitted)})
    draws = recorded_draws(trace)(ledger)
    traffic = recorded_traffic(trace, deployment.longest)
    run = Cluster(deployment, traffic, lambda _: draws, recorded_holds(trace), recorded_stops(trace))
    run.ledger = ledger
    run.run()
    for number, one in trace.requests.items():
        law(number in ledger.reasons, f"request {number} has no end")
        late = trace.blueprint.settings.depth * one.submit.request.count
        law(not one.stops or ledger.tokens[number] <= len(one.tokens) + late, f"request {number} is not ended in time")
    for replica, engine in run.engines:
        check_idle(replica, engine)
    return ledger
