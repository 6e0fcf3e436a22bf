"""Whatever happens to its engines, a deployment serves each request once, whole, and the same way each time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import BlockHasher
from model.simulated.faults import Fault
from rpc.loadgen.traces import Arrival, block_size
from rpc.simulation import cluster as cluster_module
from rpc.simulation.cluster import COLUMNS, Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.engine import SECRET
from rpc.simulation.routers import ROUTERS
from rpc.simulation.served import LatencyTargets
from rpc.simulation.traffic import BEHIND, submits
from scheduler.events import EndReason
from scheduler.scaling_settings import ScalingSettings
from scheduler.settings import QueueLimits
from tests.simulation.test_engine import COSTS, made
from tests.support.examples import examples
from tests.support.planted import plant

PATIENT = replace(made(), queue=QueueLimits(wait=1e9, pools_of_tokens=1e9, requests=10**6))


def arrivals(count: int, rate: float, seed: int, families: int = 0) -> list[Arrival]:
    """Requests at random times. With families, prompts begin with one of so many texts of 512 tokens."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return [
        Arrival(
            at,
            (512 if families else 0) + int(rng.integers(1, 200)),
            int(rng.integers(1, 60)),
            (int(rng.integers(families)), 1000 + number) if families else (),
        )
        for number, at in enumerate(times)
    ]


def test_an_idle_engine_begins_with_the_first_of_requests_that_come_at_one_moment():
    """As a real one does, which one frontend sends one request after the other."""
    burst = [Arrival(at, 5, 5) for at in (0.0, 0.0, 0.0, 9.0)]
    ledger = Cluster(Deployment(PATIENT, COSTS), submits(burst, 16)).run().ledger
    assert ledger.came.tolist() == [0.0, BEHIND, 2 * BEHIND, 9.0]
    first, second, third, alone = ledger.first.tolist()
    assert first - 0.0 == pytest.approx(alone - 9.0)
    assert first < second == third


def test_requests_reach_an_engine_in_the_order_of_the_trace_at_any_speed():
    times = [one.at for one in submits([Arrival(1e-6 * (n // 3), 5, 5) for n in range(60)], 16)]
    assert times == sorted(set(times))


deployments = st.builds(
    Deployment,
    st.just(PATIENT),
    st.just(COSTS),
    replicas=st.integers(1, 4),
    scaling=st.builds(
        ScalingSettings,
        replicas=st.sampled_from([None, 4, 6]),
        queue=st.sampled_from([0.1, 2.0]),
        ttft=st.sampled_from([None, 0.2]),
        up=st.sampled_from([0.0, 2.0]),
        down=st.sampled_from([1.0, 5.0]),
    ),
    router=st.sampled_from(sorted(ROUTERS)),
    start=st.sampled_from([0.0, 0.7, 5.0]),
    failover=st.sampled_from([0.0, 0.3]),
    faults=st.lists(
        st.builds(
            Fault,
            st.floats(0, 8),
            st.sampled_from(["kill", "slow"]),
            st.integers(0, 3),
            st.floats(0, 3),
            st.floats(0.5, 10),
        ),
        max_size=6,
    ).map(tuple),
    seed=st.integers(0, 9),
)


def served_whole(deployment: Deployment, count: int, rate: float, seed: int) -> None:
    coming = arrivals(count, rate, seed)
    run = Cluster(deployment, submits(coming, 16))
    ledger = run.run().ledger
    assert ledger.reasons == dict.fromkeys(range(count), EndReason.LENGTH)
    assert ledger.tokens.tolist() == [one.output for one in coming]
    assert (ledger.came <= ledger.first).all()
    assert (ledger.first <= ledger.last).all()


@settings(max_examples=examples(60), deadline=None)
@given(deployments, st.integers(1, 40), st.sampled_from([2.0, 10.0, 50.0]), st.integers(0, 99))
def test_each_request_is_served_once_and_whole(deployment: Deployment, count: int, rate: float, seed: int) -> None:
    served_whole(deployment, count, rate, seed)


@settings(max_examples=examples(20), deadline=None)
@given(deployments, st.integers(0, 99))
def test_two_simulations_are_equal(deployment: Deployment, seed: int) -> None:
    first, second = (
        Cluster(deployment, submits(arrivals(30, 10.0, seed, families=3), 16)).run().digest() for _ in range(2)
    )
    assert first == second


KILLED = Deployment(PATIENT, COSTS, 2, faults=(Fault(0.5, "kill", 0), Fault(1.0, "kill", 1)), start=2.0)


def nothing_goes_on(real):
    return lambda self, left, now: real(self, [], now)


def without_their_tokens(real):
    def go_on(self, left, now):
        tokens = self.ledger.tokens.copy()
        self.ledger.tokens[:] = 0
        real(self, left, now)
        self.ledger.tokens[:] = tokens

    return go_on


@pytest.mark.parametrize("fault", [nothing_goes_on, without_their_tokens])
def test_a_lost_or_doubled_token_is_caught(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    served_whole(KILLED, 30, 20.0, 1)
    plant(monkeypatch, Cluster, "_go_on", fault)
    with pytest.raises((AssertionError, RuntimeError)):
        served_whole(KILLED, 30, 20.0, 1)


def test_a_killed_engine_costs_time_and_no_request() -> None:
    calm, killed = (
        Cluster(one, submits(arrivals(40, 10.0, 2), 16)).run() for one in (replace(KILLED, faults=()), KILLED)
    )
    assert killed.ledger.tokens.tolist() == calm.ledger.tokens.tolist()
    assert killed.firsts.max() > calm.firsts.max() + 1.0  # for a time there is no engine


def test_the_router_that_serves_finds_prefixes_and_idle_engines() -> None:
    """Two engines keep all of 12 texts only if each has its own; by turns each needs all of them."""
    small = replace(PATIENT, pages=300)
    found = {
        router: Cluster(
            Deployment(small, COSTS, 3, router=router), submits(arrivals(150, 12.0, 3, families=12), 16)
        ).run()
        for router in ROUTERS
    }
    hits = {router: serving.hits / serving.queries for router, serving in found.items()}
    assert hits["cost"] > 1.3 * max(hits["random"], hits["round-robin"], hits["least-requests"])
    mean = {router: serving.firsts.mean() for router, serving in found.items()}
    assert mean["cost"] == min(mean.values())


def test_engines_come_with_load_and_go_without() -> None:
    busy = arrivals(150, 25.0, 4)
    late = [replace(one, at=one.at + 60.0) for one in arrivals(10, 0.5, 5)]
    scaling = ScalingSettings(replicas=4, queue=0.2, up=1.0, down=5.0)
    run = Cluster(Deployment(PATIENT, COSTS, 1, scaling, start=0.5), submits([*busy, *late], 16))
    run.run()
    engines = [dict(zip(COLUMNS, row, strict=True))["engines"] for row in run.samples]
    assert engines[0] == 1
    assert max(engines) > 2
    assert engines[-1] == 1


def test_pages_are_shared_where_blocks_are() -> None:
    """Block hashes of two prompts are equal as far as their blocks' ids are, also where lengths were shrunk.

    By the last factor a block has 7.99 tokens, of which a load has 7: two blocks do not fill a page. A page has
    the id at its end alone, which stands for all text before it.
    """
    hasher = BlockHasher(SECRET, b"", 16)
    for shrink in (1.0, 0.25, 0.0156):
        length = round(3 * 512 * shrink)
        coming = [
            Arrival(0, length, 1, ids)
            for ids in ((1, 2, 3), (1, 2, 4), (5, 2, 3) if shrink > 0.1 else (5, 6, 7), (), ())
        ]
        hashes = []
        for one in submits(coming, 16, shrink):
            chain = hasher.chain(one.event.request.scope)  # type: ignore[union-attr]
            chain.extend(one.event.request.prompt)  # type: ignore[union-attr]
            hashes.append(chain.hashes)
        common = [sum(a == b for a, b in zip(hashes[0], one, strict=True)) for one in hashes[1:]]
        assert common == [2 * block_size(shrink) // 16, 0, 0, 0]
        assert not set(hashes[3]) & set(hashes[4])


def test_shares_within_targets_are_counted_over_all_that_came() -> None:
    serving = Cluster(Deployment(PATIENT, COSTS), submits(arrivals(50, 20.0, 6), 16)).run()
    ledger = serving.ledger
    ttft, itl = 0.5, 0.03
    expected = np.mean(
        [
            first - came <= ttft and (tokens < 2 or (last - first) / (tokens - 1) <= itl)
            for came, first, last, tokens in zip(ledger.came, ledger.first, ledger.last, ledger.tokens, strict=True)
        ]
    )
    assert 0 < expected < 1
    assert serving.met(LatencyTargets(ttft, itl)) == pytest.approx(expected)
    impatient = replace(PATIENT, queue=QueueLimits(wait=0.1))
    refused = Cluster(Deployment(impatient, COSTS), submits(arrivals(50, 50.0, 6), 16)).run()
    assert refused.figures()["refused"] > 0
    assert refused.met(LatencyTargets()) == pytest.approx(1 - refused.figures()["refused"] / 50)


def test_a_request_that_fits_no_engine_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"a request that came at 0.000 s may have 5,010 tokens, more than the 1,601 that 100 pages hold",
    ):
        Cluster(Deployment(PATIENT, COSTS), submits([Arrival(0, 10, 10), Arrival(0, 5000, 10)], 16))


def test_samples_are_taken_over_the_time_of_the_arrivals() -> None:
    run = Cluster(Deployment(PATIENT, COSTS, 2), submits(arrivals(60, 3.0, 7), 16))
    run.run()
    seconds = [row[0] for row in run.samples]
    assert seconds == sorted(seconds)
    assert 100 < len(seconds) <= 2 * cluster_module.SAMPLES
