"""More engines and fewer: by what they have to do, with no request harmed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from model.inputs.tokenizer import Tokenizer
from rpc.engines.scaling import Scaling
from rpc.engines.supervisor import Supervisor
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.slo import SLOTracker
from rpc.observe.metrics import Metrics
from rpc.settings import EngineSettings, ServerSettings
from scheduler.autoscaling import Autoscaler, Decision, EngineLoad
from scheduler.events import EngineStats, nothing
from scheduler.limits import ModelDefaults
from scheduler.scaling_settings import ScalingSettings
from scheduler.spec import Spec
from tests.support.hosts import FakeHost
from tests.support.links import eventually

AT_ONCE = ScalingSettings(replicas=3, up=0.0, down=0.0)


class Rig:
    def __init__(
        self, tokenizer: Tokenizer, settings: ScalingSettings = AT_ONCE, hosts: Sequence[FakeHost] = ()
    ) -> None:
        self.hosts = list(hosts) or [FakeHost() for _ in range(3)]
        self.metrics = Metrics("m")
        preparer = Preparer("m", tokenizer, ModelDefaults(eos_token_ids=(0,)))
        slo = SLOTracker(settings.ttft, settings.itl)
        self.frontend = Frontend(preparer, FrontendSettings(), self.metrics, slo=slo)
        self.supervisor = Supervisor(self.hosts, self.frontend, least=1)
        self.scaling = Scaling(Autoscaler(settings, 1), self.frontend, self.metrics)

    def serving(self) -> list[int]:
        return [replica.number for replica in self.frontend.replicas.open]

    async def look(self, backlog: float = 0.0, running: int = 0) -> None:
        """At engines that say this of themselves."""
        for host, number in zip(self.hosts, range(3), strict=True):
            if number in self.serving():
                host.engines[-1].tell(nothing(EngineStats(waiting_seconds=backlog, running=running)))
        await asyncio.sleep(0)
        await self.scaling.look(self.supervisor)

    async def until_serving(self, *numbers: int) -> None:
        await eventually(lambda: self.serving() == list(numbers))

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m"} | labels)


@asynccontextmanager
async def started(rig: Rig) -> AsyncIterator[Rig]:
    await rig.supervisor.start()
    try:
        yield rig
    finally:
        await rig.supervisor.stop()
        assert not any(host.running for host in rig.hosts)
        assert [host.trouble for host in rig.hosts] == [[]] * 3


async def test_engines_come_with_the_work_and_go_after_it(tokenizer: Tokenizer) -> None:
    async with started(Rig(tokenizer)) as rig:
        assert rig.serving() == [0]
        assert rig.supervisor.summary == "1 to 3 replicas"
        await rig.look(backlog=3.0)
        await rig.until_serving(0, 1)
        await rig.look(backlog=9.0)
        await rig.until_serving(0, 1, 2)
        assert (rig.value("quire_replicas"), rig.value("quire_replicas_wanted")) == (3, 3)
        await rig.look()
        assert rig.serving() == [0, 1]
        await rig.look()
        await rig.look()
        assert rig.serving() == [0], "the least"
        assert [rig.value("quire_replica_scalings_total", direction=way) for way in ("up", "down")] == [2, 2]
        assert [replica.number for replica in rig.frontend.replicas.newest] == [0], "the others are not shown"
        await rig.look(backlog=3.0)
        await rig.until_serving(0, 1)
        assert [replica.epoch for replica in rig.frontend.replicas.newest] == [1, 2]


class Seen:
    """An autoscaler that notes the loads it is given, and wants as many replicas as there are."""

    def __init__(self) -> None:
        self.loads: list[EngineLoad] = []

    def decide(self, load: EngineLoad) -> Decision:
        self.loads.append(load)
        return Decision(load.serving + load.starting)


async def test_a_load_is_what_engines_say_and_promises_came_to(tokenizer: Tokenizer) -> None:
    async with started(Rig(tokenizer, replace(AT_ONCE, ttft=0.5))) as rig:
        assert rig.supervisor.grow()
        await rig.until_serving(0, 1)
        rig.hosts[2].gate.clear()
        assert rig.supervisor.grow()
        await eventually(lambda: rig.hosts[2].launches == 1)
        first, second = (host.engines[0] for host in rig.hosts[:2])
        assert (first.info.pages, first.info.limits.sequences) == (100, 8)
        first.tell(nothing(EngineStats(waiting_seconds=1.5, pages_used=50, running=2)))
        second.tell(nothing(EngineStats(waiting_seconds=0.25, pages_used=10, running=6)))
        await asyncio.sleep(0)
        rig.frontend.slo.observe([0.4, 0.4, 0.4, 0.6], {})
        seen = Seen()
        await Scaling(seen, rig.frontend, rig.metrics).look(rig.supervisor)  # type: ignore[arg-type]
        (load,) = seen.loads
        assert (load.serving, load.starting) == (2, 1)
        assert load.backlog == 1.75
        assert load.use == (50 / 100 + 6 / 8) / 2, "of pages or of rows, whichever is fuller"
        assert load.late == 0.25


async def test_requests_of_an_engine_that_is_ended_go_on_elsewhere(tokenizer: Tokenizer) -> None:
    async with started(Rig(tokenizer)) as rig, AsyncExitStack() as stack:
        await rig.look(backlog=3.0)
        await rig.until_serving(0, 1)
        lives = [await stack.enter_async_context(rig.frontend.open(Spec("cat"), f"r{i}", None)) for i in range(4)]
        first, second = (host.engines[0] for host in rig.hosts[:2])
        assert first.submitted()
        assert second.submitted()
        first.tell(nothing(EngineStats(running=1)))
        await asyncio.sleep(0)
        await rig.supervisor.shrink()
        assert rig.serving() == [0], "the one that had the least to do is gone"
        assert first.live == {live.attempt for live in lives}
        assert not rig.frontend.dispatch.quarantine.implicated, "no engine died"


async def test_the_one_with_the_least_to_do_is_ended_and_what_waits_counts(tokenizer: Tokenizer) -> None:
    async with started(Rig(tokenizer)) as rig:
        assert rig.supervisor.grow()
        await rig.until_serving(0, 1)
        first, second = (host.engines[0] for host in rig.hosts[:2])
        first.tell(nothing(EngineStats(running=2)))
        second.tell(nothing(EngineStats(running=1, waiting=5)))
        await asyncio.sleep(0)
        assert await rig.supervisor.shrink()
        assert rig.serving() == [1]


async def test_one_that_finds_no_room_waits_and_can_be_called_off(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    async with started(rig):
        rig.hosts[1].gate.clear()
        await rig.look(backlog=3.0)
        await eventually(lambda: rig.hosts[1].launches == 1)
        assert rig.supervisor.count == 2
        await rig.look(backlog=3.0)
        assert rig.supervisor.count == 2, "what is on its way is not asked for again"
        await rig.look()
        assert (rig.supervisor.count, rig.hosts[1].cancelled, rig.serving()) == (1, 1, [0])


async def test_a_launch_that_fails_is_tried_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.engines.supervisor.FIRST_DELAY", 0.0)

    rig = Rig(tokenizer, hosts=[FakeHost(), FakeHost([OSError("no room")]), FakeHost()])
    async with started(rig):
        await rig.look(backlog=3.0)
        await rig.until_serving(0, 1)
        assert rig.hosts[1].launches == 2


async def test_an_engine_that_does_not_end_stops_no_scaling(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.engines.scaling.LOOK_SECONDS", 0.0)

    rig, tries = Rig(tokenizer), []

    class Stubborn:
        count = 2

        async def shrink(self) -> None:
            tries.append(1)
            raise TimeoutError("it does not end")

    scaler = asyncio.create_task(rig.scaling.run(Stubborn()))
    await eventually(lambda: len(tries) > 2)
    scaler.cancel()


def test_late_answers_are_what_came_lately_and_was_late() -> None:
    slo = SLOTracker(ttft=0.5, itl=0.1)
    assert slo.late() == 0.0
    slo.observe([0.4, 0.6, 0.4, 0.4], {0.05: 19, 0.2: 1})
    assert slo.late() == pytest.approx(0.25)
    slo.observe([], {0.2: 60})
    assert slo.late() == pytest.approx((0.8 * 1 + 60) / (0.8 * 20 + 60))
    for _ in range(30):
        late = slo.late()
    assert late == 0.0, "that is long ago"
    silent = SLOTracker()
    silent.observe([99.0], {99.0: 9})
    assert silent.late() == 0.0, "nothing was promised"


def test_most_replicas_are_no_fewer_than_replicas() -> None:
    with pytest.raises(ValueError, match=r"--max-replicas is 2, must be in \[3, 256\]"):
        ServerSettings(engine=EngineSettings(replicas=3), scaling=ScalingSettings(replicas=2))


async def test_an_engine_that_an_operator_drained_does_not_count_and_is_not_ended(tokenizer: Tokenizer) -> None:
    async with started(Rig(tokenizer)) as rig:
        await rig.look(backlog=3.0)
        await rig.until_serving(0, 1)
        rig.frontend.drain_replica(0)
        for _ in range(3):
            await rig.look()
        assert rig.serving() == [1], "the only one that takes requests stays"
        await rig.look(backlog=3.0)
        await rig.until_serving(1, 2)
        rig.frontend.resume_replica(0)
        assert rig.serving() == [0, 1, 2]
        await rig.look(backlog=9.0)
        assert rig.supervisor.count == 3


async def test_more_than_there_are_hosts_for_are_not_started(tokenizer: Tokenizer) -> None:
    async with started(Rig(tokenizer)) as rig:
        assert [rig.supervisor.grow() for _ in range(3)] == [True, True, False]


async def test_an_engine_that_is_being_replaced_is_not_ended_meanwhile(tokenizer: Tokenizer) -> None:
    async with started(Rig(tokenizer)) as rig:
        await rig.look(backlog=3.0)
        await rig.until_serving(0, 1)
        rig.hosts[1].gate.clear()
        restart = asyncio.create_task(rig.supervisor.restart(1))
        await eventually(lambda: rig.hosts[1].launches == 2)
        await rig.supervisor.shrink()
        assert rig.serving() == [0]
        rig.hosts[1].gate.set()
        await restart
        assert rig.serving() == [0, 1]
