"""Scheduling policies by name."""

from collections.abc import Callable, Mapping

from scheduler.dominant_share import DominantShare
from scheduler.policy import FirstCome, SchedulingPolicy

POLICIES: Mapping[str, Callable[[int], SchedulingPolicy]] = {
    "dominant-share": DominantShare,
    "first-come": lambda pool_tokens: FirstCome(),  # noqa: ARG005
}
"""Makes a policy for a pool of this number of tokens."""
