"""The supervisor over a host that launches what a test says: no engine's death is more than a pause to a server."""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace

import pytest

from model.errors import CheckpointError
from model.inputs.tokenizer import Tokenizer
from rpc.engines import supervisor as module
from rpc.engines.process import EngineStartError
from rpc.engines.supervisor import Supervisor
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.stream import FinishReason, RequestStream
from rpc.observe.engines import EngineMetrics
from rpc.observe.metrics import Metrics
from scheduler.events import EndReason, EngineStats
from scheduler.limits import ModelDefaults
from scheduler.spec import Spec
from tests.support.frontends import outputs
from tests.support.hosts import FakeHost, Time
from tests.support.links import MortalEngine, Sink, eventually

FAILURES = [EngineStartError("no memory"), CheckpointError("no model"), ValueError("bad"), OSError("x"), MemoryError()]


class Rig:
    def __init__(self, tokenizer: Tokenizer, failures: Iterable[Exception | None] = ()) -> None:
        self.metrics = Metrics("m")
        preparer = Preparer("m", tokenizer, ModelDefaults(eos_token_ids=(0,)))
        self.frontend = Frontend(preparer, FrontendSettings(max_parked=1), self.metrics)
        self.host = FakeHost(failures)
        self.supervisor = Supervisor([self.host], self.frontend)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m", **labels})

    async def engine(self, number: int) -> MortalEngine:
        """The number-th engine, once requests go to it."""
        await eventually(lambda: len(self.host.engines) >= number and self.frontend.health())
        return self.host.engines[number - 1]

    async def end(self) -> None:
        await self.supervisor.stop()
        assert not self.host.running
        assert self.host.closes
        assert self.host.trouble == []


async def run_to_its_end(frontend: Frontend, spec: Spec) -> RequestStream:
    async with frontend.open(spec, "waits", None) as live:
        await eventually(lambda: live.stream.ended)
        return live.stream


async def refusal(frontend: Frontend, spec: Spec) -> RequestFailed:
    with pytest.raises(RequestFailed) as refused:
        await frontend.open(spec, "refused", None).__aenter__()
    return refused.value


async def test_streams_of_a_dead_engine_go_on_with_a_new_one_which_serves_under_its_own_limits(
    tokenizer: Tokenizer,
) -> None:
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    first = await rig.engine(1)
    rig.host.gate.clear()
    rig.host.limits = replace(rig.host.limits, context=16)
    async with rig.frontend.open(Spec("cat"), "a", None) as one, rig.frontend.open(Spec("dog"), "b", None) as two:
        first.tell(outputs([(first.submitted()[0], 0, 70)]))
        first.die("RuntimeError: device lost")
        await eventually(lambda: rig.host.launches == 2)
        assert not rig.frontend.health()
        waits = asyncio.create_task(run_to_its_end(rig.frontend, Spec("new")))
        await eventually(lambda: rig.frontend.dispatch.parked == 3)  # the last one is prepared, and waits
        refused = await refusal(rig.frontend, Spec("cat"))
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "STARTING")
        assert refused.retry_after is not None
        rig.host.gate.set()
        second = await rig.engine(2)
        again = [(event.emitted, event.again) for event in second.sent]
        assert again == [(((70,),), True), ((), True), ((), False)]
        for attempt, position in zip(second.submitted(), (1, 0, 0), strict=True):
            second.tell(outputs([(attempt, position, 71)], [(attempt, EndReason.LENGTH)]))
        for live, tokens in ((one, [70, 71]), (two, [71])):
            await eventually(lambda live=live: live.stream.ended)
            assert live.stream.take()[0].token_ids == tokens
        assert (await waits).take()[0].token_ids == [71]
    assert rig.value("quire_requests_total", outcome="length") == 3
    assert rig.value("quire_requests_total", outcome="starting") == 1
    assert (await refusal(rig.frontend, Spec("x" * 40))).code == "INVALID_ARGUMENT", "the new limits hold"
    async with rig.frontend.open(Spec("cat"), "a", None) as live:
        attempt = second.submitted()[-1]
        assert attempt not in (*first.submitted(), *second.submitted()[:-1])
        second.tell(outputs([(attempt, 0, 70)], [(attempt, EndReason.LENGTH)]))
        await eventually(lambda: live.stream.ended)
        assert live.stream.sequences[0].finish.reason is FinishReason.LENGTH
    assert first.finished() == []
    await rig.end()


async def test_an_engine_that_does_not_start_again_is_tried_again_ever_less_often(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch, module)
    rig = Rig(tokenizer, [None, *FAILURES, *FAILURES[:2]])
    await rig.supervisor.start()
    (await rig.engine(1)).die("gone")
    await rig.engine(2)
    assert time.delays == [0, 1, 2, 4, 8, 16, 30, 30]
    assert rig.host.launches == 9
    assert rig.value("quire_engine_starts_total") == 2
    await rig.end()


async def test_only_an_engine_that_lived_long_is_replaced_at_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch, module)
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    for number, lived in enumerate((1.0, 1.0, 1.0, module.STEADY + 1.0, 1.0), 1):
        engine = await rig.engine(number)
        await eventually(lambda: rig.frontend.live_requests == 0)
        time.now += lived
        engine.die("gone")
        await eventually(
            lambda engine=engine: (
                rig.frontend.replicas.get(0) is None or rig.frontend.replicas.get(0).client is not engine
            )
        )
    await rig.engine(6)
    assert time.delays == [0, 1, 2, 0, 1]
    await rig.end()


async def test_an_engine_that_is_dead_when_it_comes_is_replaced(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    launch = rig.host.launch

    async def stillborn(sink: Sink) -> MortalEngine:
        engine = await launch(sink)
        engine.die("stillborn")
        await asyncio.sleep(0)  # its last word comes before it is attached
        rig.host.launch = launch
        return engine

    rig.host.launch = stillborn
    await rig.supervisor.start()
    assert not rig.frontend.health()
    await rig.engine(2)
    await rig.end()


async def test_stopping_ends_the_wait_for_the_next_try(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY", 1000.0)
    monkeypatch.setattr(module, "LONGEST_DELAY", 1000.0)

    rig = Rig(tokenizer, [None, EngineStartError("no memory")])
    await rig.supervisor.start()
    (await rig.engine(1)).die("gone")
    await eventually(lambda: rig.host.launches == 2)
    await rig.end()
    assert (rig.host.launches, len(rig.host.engines)) == (2, 1)
    assert all(task.cancelled() for task in rig.supervisor.keeping.values())


async def test_stopping_ends_a_launch_that_hangs(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    rig.host.gate.clear()
    (await rig.engine(1)).die("gone")
    await eventually(lambda: rig.host.launches == 2)
    await rig.end()
    assert rig.host.cancelled == 1


async def serve_with_two_engines(rig: Rig) -> None:
    await rig.supervisor.start()
    first = await rig.engine(1)
    first.tell(replace(outputs(), stats=EngineStats(steps=6, computed_tokens=30, preemptions=1, pages_total=100)))
    first.tell(replace(outputs(), stats=EngineStats(steps=10, computed_tokens=50, preemptions=2, pages_total=100)))
    first.die("gone")
    second = await rig.engine(2)
    for steps in (3, 12):
        second.tell(replace(outputs(), stats=EngineStats(steps=steps, computed_tokens=5 * steps, pages_total=200)))
    await eventually(lambda: rig.frontend.metrics.engines.last_stats[0].steps == 12)
    await rig.end()


def check_counts_of_two_engines(rig: Rig) -> None:
    assert rig.value("quire_engine_starts_total") == 2
    assert rig.value("quire_engine_steps_total") == 10 + 12
    assert rig.value("quire_computed_tokens_total") == 50 + 60
    assert rig.value("quire_num_preemptions_total") == 2
    assert rig.value("quire_kv_pages") == 200


async def test_counts_add_up_over_engines(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    await serve_with_two_engines(rig)
    check_counts_of_two_engines(rig)


async def test_counts_that_go_on_from_the_dead_engines_are_caught(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineMetrics, "attached", lambda self, pages, engine, size: self._starts.inc())
    monkeypatch.setattr(Metrics, "engine_gone", lambda self, engine: None)

    rig = Rig(tokenizer)
    await serve_with_two_engines(rig)
    with pytest.raises(AssertionError):
        check_counts_of_two_engines(rig)


async def test_a_request_that_was_tokenized_meanwhile_goes_to_the_new_engine(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was being tokenized while the engine was replaced."""
    tokenized, goes_on = threading.Event(), threading.Event()
    prepare = Preparer.prepare

    def slow(self: Preparer, *arguments: object) -> object:
        tokenized.set()
        goes_on.wait(20)
        return prepare(self, *arguments)

    rig = Rig(tokenizer)
    await rig.supervisor.start()
    first = await rig.engine(1)
    first.tell(replace(outputs(), stats=EngineStats(steps=10, pages_total=100)))
    await eventually(lambda: rig.value("quire_engine_steps_total") == 10)
    monkeypatch.setattr(Preparer, "prepare", slow)
    opening = rig.frontend.open(Spec("cat"), "late", None)
    opened = asyncio.create_task(opening.__aenter__())
    await eventually(tokenized.is_set)
    first.die("gone")
    await rig.engine(2)
    goes_on.set()
    await opened
    assert len(rig.host.engines[1].submitted()) == 1
    await opening.__aexit__(None, None, None)
    await rig.end()
    assert rig.value("quire_engine_steps_total") == 10
    assert rig.value("quire_kv_pages") == 200


async def test_whatever_a_launch_raises_it_is_tried_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does: its OutOfMemoryError is a RuntimeError."""

    Time(monkeypatch, module)
    rig = Rig(tokenizer, [None, RuntimeError("CUDA out of memory")])
    await rig.supervisor.start()
    (await rig.engine(1)).die("gone")
    (keeper,) = rig.supervisor.keeping.values()
    await eventually(lambda: len(rig.host.engines) == 2 or keeper.done())
    assert not keeper.done()
    await rig.end()


async def test_a_host_that_cannot_stop_is_not_asked_again_at_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch, module)
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    stop, troubles = rig.host.stop, iter([TimeoutError("it does not go")] * 3)

    async def hard_to_stop() -> None:
        trouble = next(troubles, None)
        if trouble is not None:
            raise trouble
        await stop()

    rig.host.stop = hard_to_stop
    (await rig.engine(1)).die("gone")
    await rig.engine(2)
    assert time.delays == [0, 1, 2, 4]
    await rig.end()


async def test_an_engine_that_autoscaling_ends_is_not_restarted(tokenizer: Tokenizer) -> None:
    """Its task is gone, so that none would replace it, and the next one in its place would be."""
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    await rig.engine(1)
    kept = rig.supervisor.keeping.pop(0)
    with pytest.raises(RequestFailed, match="replica 0 is about to end"):
        await rig.supervisor.restart(0)
    rig.supervisor.keeping[0] = kept
    await rig.end()


async def test_a_restart_that_nobody_waits_for_any_more_goes_on(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    rig.host.gate.clear()
    restart = asyncio.create_task(rig.supervisor.restart(0))
    await eventually(lambda: rig.host.launches == 2)
    restart.cancel()
    rig.host.gate.set()
    await rig.engine(2)
    assert rig.frontend.replicas.open
    await rig.end()


async def test_a_restart_goes_on_though_its_asker_left_while_requests_were_moved(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, moved = Rig(tokenizer), asyncio.Event()
    monkeypatch.setattr(rig.frontend, "until_moved", moved.wait)
    await rig.supervisor.start()
    restart = asyncio.create_task(rig.supervisor.restart(0))
    await eventually(lambda: not rig.frontend.replicas.open)
    restart.cancel()
    await asyncio.gather(restart, return_exceptions=True)
    moved.set()
    await rig.engine(2)
    assert rig.frontend.replicas.open
    assert (rig.host.launches, rig.host.stops) == (2, 1)
    await rig.end()


async def test_an_engine_that_dies_while_a_restart_empties_it_is_replaced_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, emptied = Rig(tokenizer), asyncio.Event()
    monkeypatch.setattr(rig.frontend, "until_moved", emptied.wait)
    await rig.supervisor.start()
    restart = asyncio.create_task(rig.supervisor.restart(0))
    await eventually(lambda: not rig.frontend.replicas.open)
    (dying,) = rig.host.engines
    dying.die("killed")
    await rig.engine(2)
    emptied.set()
    await restart
    assert rig.host.launches == 2
    await rig.end()


async def test_two_who_ask_for_a_restart_get_one_and_the_same_answer(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    await rig.engine(1)
    async with rig.frontend.open(Spec("cat"), "a", None):
        rig.host.gate.clear()
        restarts = [asyncio.create_task(rig.supervisor.restart(0)) for _ in range(2)]
        await eventually(lambda: rig.host.launches == 2)
        rig.host.gate.set()
        assert await asyncio.gather(*restarts) == [1, 1], "requests that were moved"
        assert rig.host.launches == 2
    await rig.end()


async def test_a_restart_is_no_death_after_which_the_next_one_waits(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch, module)
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    for number in (1, 2, 3):
        await rig.engine(number)
        await rig.supervisor.restart(0)
    assert time.delays == [0, 0, 0]
    await rig.end()


async def test_a_restart_that_takes_too_long_says_so_and_goes_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.01)

    rig = Rig(tokenizer)
    await rig.supervisor.start()
    rig.host.gate.clear()
    with pytest.raises(RequestFailed, match=r"not there again after 0\.01 s") as failed:
        await rig.supervisor.restart(0)
    assert (failed.value.code, failed.value.reason) == ("UNAVAILABLE", "NOT_RESTARTED")
    rig.host.gate.set()
    await rig.engine(2)
    await rig.end()


async def test_an_engine_that_does_not_end_is_the_callers_to_hear(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    await rig.supervisor.start()
    stop = rig.host.stop

    async def stubborn() -> None:
        raise TimeoutError("it does not go")

    rig.host.stop = stubborn  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="it does not go"):
        await rig.supervisor.stop()
    rig.host.stop = stop  # type: ignore[method-assign]
    await rig.end()


class FakeTable:
    """Other frontends, which have let go of an engine once `settled` has returned. launches: of the host by then."""

    def __init__(self, host: FakeHost) -> None:
        self._host, self.launches = host, list[int]()

    async def open(self) -> None:
        pass

    async def settled(self) -> None:
        await asyncio.sleep(0)
        self.launches.append(self._host.launches)

    async def close(self) -> None:
        pass


async def test_other_frontends_let_go_of_an_engine_before_it_is_replaced(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    table = FakeTable(rig.host)
    supervisor = Supervisor([rig.host], rig.frontend, table=table)  # type: ignore[arg-type]
    await supervisor.start()
    await supervisor.restart(0)
    assert table.launches == [1]
    await supervisor.stop()
    assert table.launches == [1, 2]
