"""Scheduling policies by name."""

from collections.abc import Callable, Mapping

from scheduler.dominant_share import DominantShare
from scheduler.fair import FairService
from scheduler.least_slack import LeastSlack
from scheduler.policy import FirstCome, SchedulingPolicy
from scheduler.priority import AgeingPriority
from scheduler.settings import SchedulerSettings

POLICIES: Mapping[str, Callable[[SchedulerSettings, int], SchedulingPolicy]] = {
    "deadline": lambda settings, pool_tokens: LeastSlack(),  # noqa: ARG005
    "dominant-share": lambda settings, pool_tokens: DominantShare(pool_tokens, settings.backfill_time),
    "fair": lambda settings, pool_tokens: FairService(settings.weights),  # noqa: ARG005
    "fair-deadline": lambda settings, pool_tokens: FairService(settings.weights, LeastSlack()),  # noqa: ARG005
    "first-come": lambda settings, pool_tokens: FirstCome(settings.backfill_time),  # noqa: ARG005
    "priority": lambda settings, pool_tokens: AgeingPriority(settings.priority_ageing),  # noqa: ARG005
}
"""Makes a policy for these settings and a pool of this number of tokens."""
