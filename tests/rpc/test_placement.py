"""How many engines of one server may come to share a node of a Ray cluster."""

import pytest

from rpc.cluster.placement import Needs, sharing


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
