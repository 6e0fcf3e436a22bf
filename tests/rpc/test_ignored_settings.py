"""A server does not start with a setting that its scheduling policy ignores."""

from dataclasses import replace

import pytest

from rpc.settings import ServerSettings
from scheduler.settings import SchedulerSettings


def test_a_server_refuses_a_setting_that_its_policy_ignores() -> None:
    with pytest.raises(ValueError, match="--tenant-weights is ann=2, which --scheduling-policy dominant-share ignores"):
        ServerSettings(scheduler=SchedulerSettings(tenant_weights="ann=2"))
    assert ServerSettings(scheduler=SchedulerSettings(policy="fair", tenant_weights="ann=2")).scheduler.weights


def test_a_recording_may_be_replayed_under_another_policy() -> None:
    recorded = SchedulerSettings(policy="fair", tenant_weights="ann=2")
    assert replace(recorded, policy="deadline").weights
