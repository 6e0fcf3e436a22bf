"""Runs `tests/model/gpu/device` on a CPU: on a device they must find what they need, and no mistake of their own."""

import pytest
import torch

from tests.support.interpreted import SECONDS, check_apart


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.timeout(SECONDS)
@pytest.mark.slow
@pytest.mark.every_part
def test_what_runs_on_devices_runs_on_a_cpu() -> None:
    check_apart("tests/model/gpu/device", environment={"QUIRE_DEVICE_TESTS": "cpu"})
