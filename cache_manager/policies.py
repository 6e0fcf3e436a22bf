"""The registry of eviction policies, by their names in `cache_manager.settings`."""

from cache_manager.cached import PolicyMaker
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.reuse import ReuseAware

POLICIES: dict[str, PolicyMaker] = {"reuse": ReuseAware, "lru": LeastRecentlyUsed}
