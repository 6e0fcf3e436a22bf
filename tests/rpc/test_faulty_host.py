"""Each fault of a place happens once, at its time, to the engine that serves then."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.simulated.faults import KILL, SLOW, STALL, Fault
from rpc.engines.faulty import FaultyHost
from rpc.settings import EngineConfig
from tests.support.examples import examples
from tests.support.links import MortalEngine, Sink
from tests.support.planted import plant
from tests.support.virtual_time import in_virtual_time

Times = list[float]
PAUSE = 2.0  # seconds until the place of an engine that was killed is tried again
END = 60.0


class Place:
    """A host whose engines take a while to start, and live until they are killed.

    Attributes:
        kills: Times of kills, on the loop's clock.
        launched: Time of each launch, and the faults that its engine got.
    """

    def __init__(self, start: float) -> None:
        self.config = EngineConfig()
        self.kills: Times = []
        self.launched: list[tuple[float, tuple[Fault, ...]]] = []
        self.dead = asyncio.Event()
        self._start = start

    async def prepare(self) -> None:
        """Nothing is loaded."""

    async def launch(self, sink: Sink) -> MortalEngine:
        self.launched.append((asyncio.get_running_loop().time(), self.config.step_faults))
        await asyncio.sleep(self._start)
        self.dead.clear()
        return MortalEngine(sink)

    def kill(self) -> None:
        self.kills.append(asyncio.get_running_loop().time())
        self.dead.set()

    async def stop(self) -> None:
        """Nothing is left of it."""

    async def close(self) -> None:
        """Nothing was kept."""


@in_virtual_time
async def kept(faults: Sequence[Fault], start: float) -> Place:
    """Keeps an engine alive for a time, as a supervisor does. Returns its place, with times since the first served."""
    place = Place(start)
    host = FaultyHost(place, faults)
    first = asyncio.get_running_loop().time() + start
    try:
        async with asyncio.timeout(start + END):
            while True:
                await host.launch(lambda _: None)
                await place.dead.wait()
                await host.stop()
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        await host.stop()
    place.kills = [at - first for at in place.kills]
    place.launched = [(max(0.0, at - first), got) for at, got in place.launched]
    return place


def check_happen_once(faults: Sequence[Fault], start: float) -> None:
    found, serves = kept(faults, start), 0.0
    kills, launches = Times(), [0.0]
    for at in sorted(fault.at for fault in faults if fault.kind == KILL):
        if at >= serves:
            kills.append(at)
            launches.append(at + PAUSE)
            serves = at + PAUSE + start
    assert found.kills == kills
    assert [at for at, _ in found.launched] == launches
    for launched, got in found.launched:
        due = [fault for fault in faults if fault.kind != KILL and fault.at >= launched]
        expected = [replace(fault, at=fault.at - launched) for fault in due]
        assert list(got) == sorted(expected, key=lambda fault: fault.at)


FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 30), st.sampled_from((KILL, SLOW, STALL)), st.just(0), st.just(3)), max_size=8
)


@settings(max_examples=examples(60), deadline=None)
@given(FAULTS, st.sampled_from((1.0, 4.0)))
def test_each_fault_happens_once_to_the_engine_that_serves(faults: list[Fault], start: float) -> None:
    check_happen_once(faults, start)


def that_counts_anew(real: Any) -> Any:
    """The times of each engine count from its own start."""

    async def launch(self: FaultyHost, sink: Sink) -> Any:
        self.left, self._first = [Fault(5, KILL, 0)], None
        return await real(self, sink)

    return launch


def test_an_engine_that_dies_of_what_killed_the_one_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    check_happen_once([Fault(5, KILL, 0)], 1.0)
    plant(monkeypatch, FaultyHost, "launch", that_counts_anew)
    with pytest.raises(AssertionError):
        check_happen_once([Fault(5, KILL, 0)], 1.0)


@in_virtual_time
async def test_no_fault_happens_after_the_end_of_its_server() -> None:
    place = Place(1.0)
    host = FaultyHost(place, [Fault(5, KILL, 0)])
    await host.launch(lambda _: None)
    await host.stop()
    await asyncio.sleep(20)
    assert place.kills == []
