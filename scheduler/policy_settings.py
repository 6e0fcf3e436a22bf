"""Settings that some scheduling policies use and others ignore."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from scheduler.settings import SchedulerSettings

USED_BY: Mapping[str, tuple[str, ...]] = {
    "tenant_weights": ("fair", "fair-deadline"),
    "priority_ageing": ("priority",),
    "backfill_time": ("dominant-share", "first-come"),
}
"""Policies that use a setting, by its name."""

HOLDS_ANYWAY: Mapping[str, Any] = {"backfill_time": 0.0}
"""Values that describe what policies do that ignore the setting."""


def is_ignored(setting: str, policy: str) -> bool:
    """Returns whether a policy ignores a setting of the scheduler."""
    return setting in USED_BY and policy not in USED_BY[setting]


def check_policy_settings(settings: SchedulerSettings) -> None:
    """Refuses a setting that the policy ignores. A default passes: it is there whether it was given or not.

    Not part of the settings' own checks: a recording is replayed under other policies with the settings that it has.

    Raises:
        ValueError: The message names the flag, the policy, and those that use the flag.
    """
    for one in fields(settings):
        policies, value = USED_BY.get(one.name, ()), getattr(settings, one.name)
        if not is_ignored(one.name, settings.policy) or value in (one.default, HOLDS_ANYWAY.get(one.name)):
            continue
        flag = "--" + one.name.replace("_", "-")
        used_by = f"{' and '.join(policies)} {'use' if len(policies) > 1 else 'uses'} it"
        raise ValueError(f"{flag} is {value}, which --scheduling-policy {settings.policy} ignores; {used_by}")
