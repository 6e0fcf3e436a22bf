"""Clients that leave, wait no longer, or come with tokens, whatever happens to engines meanwhile."""

from dataclasses import replace

import numpy as np
import pytest

from model.simulated.faults import Fault
from rpc.loadgen.traces import Arrival
from rpc.simulation.cluster import COLUMNS, PARKED_SECONDS, Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.served import LatencyTargets
from rpc.simulation.traffic import Timed, submits
from scheduler.events import Abort, EndReason, Submit
from scheduler.scaling_settings import ScalingSettings
from tests.scheduler.workloads import make_request
from tests.simulation.test_cluster import PATIENT
from tests.simulation.test_engine import COSTS

LONG = Arrival(0.0, 50, 300)
KILL = Deployment(PATIENT, COSTS, 1, faults=(Fault(0.3, "kill", 0),), start=2.0, failover=1.0)


def test_a_client_that_leaves_while_its_engine_is_dead_is_gone() -> None:
    for at in (0.5, 1.5):  # before and after the end of the engine is noticed
        serving = Cluster(KILL, [*submits([LONG], 16), Timed(at, 0, Abort(0))]).run()
        assert serving.ledger.reasons == {0: EndReason.FINISHED}
        assert serving.ledger.tokens[0] < 300
        assert serving.met(LatencyTargets()) == 0
        assert serving.seconds <= 2.0


def test_a_deadline_ends_what_is_not_done() -> None:
    serving = Cluster(Deployment(PATIENT, COSTS), submits([LONG, Arrival(0.0, 5, 2)], 16, deadline=1.0)).run()
    assert serving.ledger.reasons == {0: EndReason.FINISHED, 1: EndReason.LENGTH}
    assert serving.ledger.last[0] == pytest.approx(1.0, abs=0.1)
    assert serving.met(LatencyTargets()) == 0.5


def test_tokens_that_a_request_came_with_are_kept() -> None:
    request = make_request(0, 50, 60)
    known = Timed(0.0, 0, Submit(0, request, emitted=((5,) * 30,)))
    calm = Cluster(replace(KILL, faults=()), [known]).run()
    killed = Cluster(KILL, [known]).run()
    assert calm.ledger.tokens[0] == killed.ledger.tokens[0] == 30


def test_time_in_the_queue_is_over_for_a_request_that_was_served() -> None:
    """One row an engine: what the dead one left waits behind the other's request for longer than it would have."""
    one_row = replace(PATIENT, settings=replace(PATIENT.settings, max_sequences=1))
    killing = Deployment(one_row, COSTS, 2, faults=(Fault(0.3, "kill", 0),), start=1e6, failover=0.1)
    traffic = [Timed(0.0, i, Submit(i, replace(make_request(i, 50, 300), queue_timeout=0.5))) for i in range(3)]
    both = traffic[:2]
    serving = Cluster(killing, both).run()
    assert serving.ledger.reasons == {0: EndReason.LENGTH, 1: EndReason.LENGTH}
    assert Cluster(killing, traffic).run().ledger.reasons[2] is EndReason.QUEUE_TIMEOUT, "which was never served"


def test_times_go_on_while_there_is_no_engine() -> None:
    dead = replace(KILL, faults=(Fault(0.0, "kill", 0),), start=20.0, failover=0.1)
    request = replace(make_request(0, 50, 30), queue_timeout=3.0)
    serving = Cluster(dead, [Timed(1.0, 0, Submit(0, request))]).run()
    assert serving.ledger.reasons == {0: EndReason.QUEUE_TIMEOUT}
    assert serving.seconds == pytest.approx(3.0)


def test_a_served_request_of_several_sequences_waits_however_often_its_engine_dies() -> None:
    one_row = replace(PATIENT, settings=replace(PATIENT.settings, max_sequences=2))
    faults = (Fault(0.3, "kill", 0), Fault(0.7, "kill", 1))
    killing = Deployment(one_row, COSTS, 3, faults=faults, start=1e6, failover=0.1)
    request = replace(make_request(0, 50, 300), queue_timeout=0.5, count=2)
    serving = Cluster(killing, [Timed(0.0, i, Submit(i, request)) for i in range(3)]).run()
    assert set(serving.ledger.reasons.values()) == {EndReason.LENGTH}


def test_several_sequences_begin_anew_with_the_tokens_that_they_came_with() -> None:
    request = replace(make_request(0, 50, 60), count=2)
    known = Timed(0.0, 0, Submit(0, request, emitted=((5,) * 50, (5,) * 20), again=True))
    calm, killed = (Cluster(replace(KILL, faults=faults), [known]).run() for faults in ((), (Fault(0.1, "kill", 0),)))
    assert calm.ledger.tokens[0] == killed.ledger.tokens[0] == 50


def test_a_client_stops_after_the_same_tokens_on_a_slower_engine() -> None:
    traffic = submits([LONG], 16)
    for faults in ((), (Fault(0.0, "slow", 0, 60.0, 5.0),)):
        serving = Cluster(replace(KILL, faults=faults), traffic, stops={0: 27}).run()
        assert serving.ledger.reasons == {0: EndReason.FINISHED}
        assert serving.ledger.tokens[0] == 27
        assert serving.met(LatencyTargets()) == 1


def test_requests_without_an_engine_fail_after_a_time() -> None:
    late = replace(KILL, start=1000.0)
    serving = Cluster(late, submits([LONG], 16)).run()
    assert serving.ledger.reasons == {0: EndReason.ENGINE_FAILED}
    assert serving.seconds == pytest.approx(0.3 + 1.0 + PARKED_SECONDS)


def test_several_sequences_have_a_time_each() -> None:
    """Two that go on from one prompt take as many steps as one, so a token of each takes as long."""
    alone, two = (
        Cluster(
            replace(KILL, faults=()), [Timed(0.0, 0, Submit(0, replace(make_request(0, 50, 40), count=count)))]
        ).run()
        for count in (1, 2)
    )
    assert two.ledger.tokens[0] == 2 * alone.ledger.tokens[0]
    assert two.others[0] == pytest.approx(alone.others[0], rel=0.2)


def test_engines_start_and_end_in_gaps_without_an_event() -> None:
    burst = [Arrival(0.0, 100, 60)] * 40
    scaling = ScalingSettings(replicas=3, queue=0.1, up=0.0, down=3.0)
    run = Cluster(Deployment(PATIENT, COSTS, 1, scaling, start=1.0), submits([*burst, Arrival(200.0, 5, 5)], 16))
    run.run()
    times, engines = np.array(run.samples)[:, [COLUMNS.index("seconds"), COLUMNS.index("engines")]].T
    assert engines.max() > 1
    assert engines[times > 60.0].max() == 1
