"""A setting beside a policy that ignores it is refused at start."""

import pytest

from scheduler.policy_settings import USED_BY, check_policy_settings
from scheduler.settings import SCHEDULING_POLICIES, SchedulerSettings

VALUES = {"tenant_weights": "ann=2", "priority_ageing": 3.0, "backfill_time": 2.0}


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("name", USED_BY)
def test_a_setting_that_the_policy_ignores_is_refused(name: str, policy: str) -> None:
    settings = SchedulerSettings(policy=policy, **{name: VALUES[name]})  # type: ignore[arg-type]
    if policy in USED_BY[name]:
        check_policy_settings(settings)
        return
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} is {VALUES[name]}, which --scheduling-policy {policy} ignores"):
        check_policy_settings(settings)


def test_the_message_names_the_policies_that_use_it() -> None:
    with pytest.raises(
        ValueError, match=r"--tenant-weights is ann=2, .* first-come ignores; fair and fair-deadline use"
    ):
        check_policy_settings(SchedulerSettings(policy="first-come", tenant_weights="ann=2"))
    with pytest.raises(ValueError, match=r"--priority-ageing is 3\.0, .* fair ignores; priority uses it"):
        check_policy_settings(SchedulerSettings(policy="fair", priority_ageing=3.0))


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_defaults_pass_and_so_does_what_holds_anyway(policy: str) -> None:
    check_policy_settings(SchedulerSettings(policy=policy))
    check_policy_settings(SchedulerSettings(policy=policy, backfill_time=0.0))
