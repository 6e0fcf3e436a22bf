"""Tenants: their figures are those of their requests, and a draw gives a trace's requests some."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.loadgen.traces import Arrival
from rpc.simulation import tenants as tenants_module
from rpc.simulation.cluster import Cluster
from rpc.simulation.deployment import Deployment
from rpc.simulation.served import Serving
from rpc.simulation.tenants import MOST_SHOWN, by_tenant, with_tenants
from rpc.simulation.traffic import Timed, submits
from scheduler.events import EndReason, Submit
from scheduler.settings import QueueLimits
from tests.simulation.test_cluster import PATIENT, arrivals
from tests.simulation.test_engine import COSTS
from tests.support.examples import examples
from tests.support.planted import plant

IMPATIENT = replace(PATIENT, queue=QueueLimits(wait=0.5))


def tenant_of(one: Timed) -> str:
    assert isinstance(one.event, Submit)
    return one.event.request.scope.tenant


def served(traffic: list[Timed], blueprint=IMPATIENT) -> Serving:
    return Cluster(Deployment(blueprint, COSTS), traffic).run()


def figures_are_those_of_the_requests(count: int, tenants: int, seed: int) -> None:
    traffic = with_tenants(submits(arrivals(count, 60.0, seed), 16), tenants, seed)
    serving = served(traffic)
    ledger, found = serving.ledger, by_tenant(traffic, serving.ledger)
    own = {one.tenant: one.figures for one in found if not one.tenant.startswith("others")}
    assert len(own) == min(MOST_SHOWN, len({tenant_of(one) for one in traffic}))
    for tenant, figures in own.items():
        mine = [one.request for one in traffic if tenant_of(one) == tenant]
        firsts = [ledger.first[one] - ledger.came[one] for one in mine if ledger.tokens[one]]
        means = [(ledger.last[n] - ledger.first[n]) / (ledger.tokens[n] - 1) for n in mine if ledger.tokens[n] > 1]
        assert figures["requests"] == len(mine)
        assert figures["output tokens"] == sum(int(ledger.tokens[one]) for one in mine)
        assert figures["refused"] == sum(ledger.reasons[one] is not EndReason.LENGTH for one in mine)
        for name, values in (("first token, s", firsts), ("a token after it, s", means)):
            for percent in (50, 99):
                expected = np.percentile(values, percent) if values else np.nan
                assert figures[f"{name}, p{percent}"] == pytest.approx(expected, nan_ok=True)
    for name in ("requests", "refused", "output tokens"):
        whole = int(ledger.tokens.sum()) if name == "output tokens" else serving.figures()[name]
        assert sum(one.figures[name] for one in found) == whole


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 60), st.sampled_from([1, 2, 5, 30]), st.integers(0, 99))
def test_figures_of_a_tenant_are_those_of_its_requests(count: int, tenants: int, seed: int) -> None:
    figures_are_those_of_the_requests(count, tenants, seed)


def all_of_one(real):
    return lambda ledger, requests: real(ledger, requests[:1])


def test_a_request_that_is_not_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tenants_module, "_figures", all_of_one)
    with pytest.raises(AssertionError):
        figures_are_those_of_the_requests(40, 5, 1)


def test_the_largest_come_first_and_the_others_are_together() -> None:
    """13 tenants; the prompt of each next one is longer, and so is one that is refused."""
    traffic = [
        replace(one, event=replace(one.event, request=replace(request, scope=replace(request.scope, tenant=f"t{n}"))))
        for n, one in enumerate(submits([Arrival(0.1 * n, 10 + n, 2) for n in range(13)], 16))
        if isinstance(one.event, Submit) and (request := one.event.request)
    ]
    found = by_tenant(traffic, served(traffic).ledger)
    assert [one.tenant for one in found] == [f"t{n}" for n in range(12, 2, -1)] + ["others (3)"]
    assert found[-1].figures["requests"] == 3


def test_one_tenant_has_no_figures_of_its_own() -> None:
    traffic = submits(arrivals(5, 5.0, 1), 16)
    assert {tenant_of(one) for one in traffic} == {DEFAULT_TENANT}
    assert by_tenant(traffic, served(traffic).ledger) == []


def test_a_draw_depends_on_its_seed_and_changes_the_tenant_alone() -> None:
    before = submits(arrivals(50, 5.0, 1), 16, deadline=9.0)
    first, second, other = (with_tenants(before, 7, seed) for seed in (1, 1, 2))
    drawn = [[tenant_of(one) for one in traffic if isinstance(one.event, Submit)] for traffic in (first, second, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    for one, old in zip(first, before, strict=True):
        assert (one.at, one.request, type(one.event)) == (old.at, old.request, type(old.event))
        if isinstance(one.event, Submit) and isinstance(old.event, Submit):
            request, was = one.event.request, old.event.request
            assert request.prompt is was.prompt
            assert (request.max_tokens, request.deadline) == (was.max_tokens, was.deadline)


def test_parts_are_as_zipf_has_them() -> None:
    traffic = with_tenants(submits([Arrival(0.0, 1, 1)] * 6000, 16), 3, 0)
    found = Counter(tenant_of(one) for one in traffic)
    whole = 1 + 1 / 2 + 1 / 3
    for number in (1, 2, 3):
        assert found[f"tenant-{number}"] / 6000 == pytest.approx(1 / number / whole, abs=0.02)


def test_a_fair_policy_serves_small_tenants_sooner() -> None:
    """Under overload, beside a tenant that has most of the traffic."""
    median = {}
    for policy in ("first-come", "fair"):
        blueprint = replace(PATIENT, settings=replace(PATIENT.settings, policy=policy))
        traffic = with_tenants(submits(arrivals(120, 60.0, 3), 16), 6, 0)
        found = by_tenant(traffic, served(traffic, blueprint).ledger)
        median[policy] = found[-1].figures["first token, s, p50"]
    assert median["fair"] < 0.5 * median["first-come"]
