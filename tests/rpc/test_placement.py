"""What an engine asks of a Ray cluster."""

import pytest

from rpc.cluster.placement import needs_gpu


@pytest.mark.parametrize(
    ("device", "there", "may_come", "needed"),
    [
        ("auto", 2, True, True),
        ("auto", 0, True, False),
        ("auto", 0, False, False),
        ("cuda", 2, False, True),
        ("cuda", 0, True, True),  # its node is started for it
        ("cuda", 0, False, False),  # this machine has none: the engine says so
        ("cpu", 2, True, False),
    ],
)
def test_an_engine_needs_a_gpu_that_is_there_or_is_insisted_on(
    device: str, there: float, may_come: bool, needed: bool
) -> None:
    assert needs_gpu(device, there, may_come) is needed
