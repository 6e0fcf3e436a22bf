"""The eviction policies by the names that settings know them by."""

from cache_manager.cached import PolicyMaker
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.reuse import ReuseAware

POLICIES: dict[str, PolicyMaker] = {"reuse": ReuseAware, "lru": LeastRecentlyUsed}
