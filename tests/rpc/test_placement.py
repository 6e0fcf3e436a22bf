"""What an engine asks of a Ray cluster, and how many of a server may come to share a node of it."""

import pytest

from rpc.cluster.placement import Needs, needs_gpu, sharing


def nodes(*cpus: float) -> list[dict]:
    return [{"Alive": True, "NodeID": str(i), "Resources": {"CPU": count}} for i, count in enumerate(cpus)]


@pytest.mark.parametrize(
    ("needs", "engines", "cpus", "most"),
    [
        (Needs(cpus=8), 3, (8,), 1),
        (Needs(cpus=2), 3, (8,), 3),
        (Needs(cpus=2), 5, (8,), 4),
        (Needs(cpus=0.5), 2, (1,), 2),
        (Needs(processes=2, cpus=2), 3, (8,), 2),
        (Needs(processes=4, cpus=2, spread=True), 3, (4, 4), 2),
        (Needs(processes=4, cpus=2, spread=True), 3, (2, 8), 3),
        (Needs(cpus=1, gpus=1), 3, (8,), 1),
        (Needs(cpus=1), 3, (), 1),
    ],
)
def test_as_many_as_have_room_there(needs: Needs, engines: int, cpus: tuple[float, ...], most: int) -> None:
    assert sharing(needs, engines, nodes(*cpus)) == most


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
