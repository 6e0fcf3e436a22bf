"""Settings of the cache are refused before anything runs."""

import pytest

from cache_manager import settings
from cache_manager.policies import POLICIES
from cache_manager.settings import CacheSettings


def test_an_unknown_eviction_policy_is_refused():
    with pytest.raises(ValueError, match="--eviction-policy is 'random', must be one of reuse, lru"):
        CacheSettings(eviction="random")


@pytest.mark.parametrize("policy", settings.POLICIES)
def test_every_policy_that_settings_know_is_there(policy):
    assert POLICIES[CacheSettings(eviction=policy).eviction].name == policy
