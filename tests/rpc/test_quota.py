"""Quotas of tenants, over drawn takings and givings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.frontend.errors import RequestFailed
from rpc.frontend.quota import Quota

MOST = 9
TENANTS = st.sampled_from([DEFAULT_TENANT, "ann", "bob"])


@given(st.lists(st.tuples(TENANTS, st.integers(0, 10), st.booleans())))
def test_a_taking_is_refused_just_where_it_would_be_too_much(steps: list[tuple[str, int, bool]]) -> None:
    quota, held = Quota(MOST, "things are held"), list[tuple[str, int]]()
    for tenant, amount, gives in steps:
        if gives and held:
            quota.give_back(*held.pop(0))
        own = amount + sum(a for t, a in held if t == tenant)
        fits = amount + sum(a for _, a in held) <= MOST and (tenant == DEFAULT_TENANT or own <= MOST // 2)
        if fits:
            quota.check(tenant, amount)
            quota.take(tenant, amount)
            held.append((tenant, amount))
        else:
            with pytest.raises(RequestFailed, match=r"things are held.*the limit"):
                quota.check(tenant, amount)


def test_of_one_thing_anybody_may_have_it() -> None:
    quota = Quota(1, "things are held")
    with quota.held("ann"), pytest.raises(RequestFailed, match="1 things are held for 'ann', the limit for one"):
        quota.check("ann")
    with quota.held("bob"), pytest.raises(RequestFailed, match="1 things are held, the limit is 1"):
        quota.check("ann")
