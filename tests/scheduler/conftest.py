"""Fixtures of the engine's tests."""

import pytest

from tests.scheduler.engine_rig import PATIENCE, Rig


@pytest.fixture
def make_rig():
    rigs: list[Rig] = []

    def make(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.engine.alive:
            rig.engine.stop(PATIENCE)
