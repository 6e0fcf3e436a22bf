"""Requests whose engine dies go on with another one: no gap, no duplicate, one end."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.engine_client import Reach
from rpc.frontend.live import Live
from scheduler.events import End, EndReason, EngineStats, KVSource, StepOutputs, nothing
from scheduler.parameters import Beam, Sampling, Stopping
from scheduler.spec import Spec
from tests.support.examples import examples
from tests.support.fleet import CAT, Fleet, opened
from tests.support.frontends import outputs
from tests.support.links import MortalEngine, eventually


async def test_a_stream_goes_on_where_it_was_and_zombies_are_not_heard(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer)
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1)
        fleet.tell(live, (0, 70), (1, 71), start=True)
        place, attempt = fleet.place_of(live), live.attempt
        zombie = fleet.engines[place]
        fleet.kill(place)
        submit = fleet.submit_of(live)
        assert (submit.emitted, submit.again, submit.isolated_steps) == (((70, 71),), True, 0)
        assert submit.attempt != attempt
        zombie.tell(outputs([(attempt, 2, 99)], [(attempt, EndReason.LENGTH)]))
        fleet.tell(live, (2, 72), end=EndReason.LENGTH, start=True)
        (delta,) = live.stream.take()
        assert delta.token_ids == [70, 71, 72]
    assert fleet.outcome("length") == 1
    value = fleet.metrics.registry.get_sample_value
    assert value("quire_request_queue_time_seconds_count", {"model_name": "m"}) == 1, "it started once"


async def test_what_of_several_sequences_is_over_is_not_asked_for_again(tokenizer: Tokenizer) -> None:
    spec = Spec("cat", sampling=Sampling(sequence_count=3, temperature=1.0), stopping=Stopping(stop=("G",)))

    def three(attempt: int, *tokens: tuple[int, int, int], ends: Sequence[End] = ()) -> StepOutputs:
        step = outputs([(attempt, position, token) for _, position, token in tokens])
        indices = np.array([index for index, _, _ in tokens], np.int32)
        return StepOutputs(**{f: getattr(step, f) for f in step.__slots__} | {"indices": indices, "ends": tuple(ends)})

    fleet = Fleet(tokenizer)
    stop = tokenizer.encode("G", add_special_tokens=False)[0]
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1, spec)
        engine = fleet.engines[fleet.place_of(live)]
        ends = [End(live.attempt, EndReason.LENGTH, index=2, more=True)]
        engine.tell(three(live.attempt, (0, 0, stop), (1, 0, 70), (2, 0, 71), (1, 1, 72), ends=ends))
        fleet.kill(fleet.place_of(live))
        assert fleet.submit_of(live).emitted == (None, (70, 72), None)


async def test_a_search_starts_again(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer)
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1, Spec("cat", sampling=Sampling(beam=Beam(2))))
        fleet.kill(fleet.place_of(live))
        assert fleet.submit_of(live).emitted == ()


async def test_who_has_started_waits_without_limit_and_who_has_not_as_long_as_was_left(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        served, waiting = await opened(stack, fleet, 2, Spec("cat", max_queue_time=50.0))
        fleet.tell(served, start=True)
        fleet.kill(0)
        fleet.bring(0)
        assert fleet.submit_of(served).request.queue_timeout is None
        assert 0 < fleet.submit_of(waiting).request.queue_timeout <= 50.0


async def test_an_engine_knows_what_is_left_until_the_deadline(tokenizer: Tokenizer) -> None:
    """The sooner of `max_time` and the caller's own, also on the next engine."""
    fleet, spec = Fleet(tokenizer, engines=1), Spec("cat", max_time=50.0)
    async with AsyncExitStack() as stack:
        (slow,) = await opened(stack, fleet, 1, spec)
        hasty = await stack.enter_async_context(fleet.frontend.open(spec, "hasty", 20.0))
        before = [fleet.submit_of(live).request.deadline for live in (slow, hasty)]
        assert 0 < before[1] <= 20.0 < before[0] <= 50.0
        fleet.kill(0)
        fleet.bring(0)
        after = [fleet.submit_of(live).request.deadline for live in (slow, hasty)]
        assert all(0 < later < sooner for later, sooner in zip(after, before, strict=True))


async def test_without_an_engine_they_wait_for_one_and_not_for_ever(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1, failover=0.05)
    async with AsyncExitStack() as stack:
        goes_on, leaves = await opened(stack, fleet, 2)
        fleet.kill(0)
        assert not goes_on.stream.ended
        fleet.frontend.dispatch.forget(leaves)
        engine = fleet.bring(0)
        assert engine.submitted() == [goes_on.attempt], "who has left meanwhile is not brought back"
        await asyncio.sleep(0.1)
        assert not goes_on.stream.ended, "it waits no longer"
        fleet.kill(0)
        await eventually(lambda: goes_on.stream.ended)
        assert (goes_on.stream.failure.code, goes_on.stream.failure.reason) == ("UNAVAILABLE", "ENGINE_FAILED")
        assert "within 0.05 s" in goes_on.stream.failure.message


async def test_a_server_that_ends_takes_its_requests_with_it(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        (parked,) = await opened(stack, fleet, 1)
        fleet.kill(0)
        fleet.frontend.close()
        assert parked.stream.failure.reason == "ENGINE_FAILED"
        fleet.bring(0)
        (running,) = [await stack.enter_async_context(fleet.frontend.open(Spec("cat"), "late", None))]
        fleet.kill(0)
        assert running.stream.failure.reason == "ENGINE_FAILED"


async def test_each_time_without_an_engine_has_its_own_limit(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1, failover=0.03)
    async with AsyncExitStack() as stack:
        (first,) = await opened(stack, fleet, 1)
        fleet.kill(0)
        await eventually(lambda: first.stream.ended)
        second = await stack.enter_async_context(fleet.frontend.open(CAT, "second", None))
        await eventually(lambda: second.stream.ended)
        assert second.stream.failure.reason == "ENGINE_FAILED"


async def test_each_request_waits_its_own_time_for_an_engine(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        (first,) = await opened(stack, fleet, 1)
        fleet.kill(0)
        second = await stack.enter_async_context(fleet.frontend.open(CAT, "second", None))
        timers = [first.failover_timer, second.failover_timer]
        assert timers[0].when() < timers[1].when(), "who comes later waits as long as who came first"
        replica = fleet.frontend.new_replica(0)
        replica.drained = True
        fleet.frontend.attach(MortalEngine(lambda step: fleet.dispatch.deliver(step, replica)), 0)
        assert [first.failover_timer, second.failover_timer] == timers, "a drained engine is none to wait less for"
        assert not any(timer.cancelled() for timer in timers)
        fleet.frontend.resume_replica(0)
        assert all(timer.cancelled() for timer in timers)
        assert first.failover_timer is second.failover_timer is None


async def test_patience_ends_where_there_is_no_engine_too(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    fleet.kill(0)
    async with AsyncExitStack() as stack:
        spec = Spec("cat", max_queue_time=0.02)
        live = await stack.enter_async_context(fleet.frontend.open(spec, "r", None))
        await eventually(lambda: live.stream.ended)
        assert (live.stream.failure.code, live.stream.failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT")


async def test_patience_that_began_twice_ends_with_the_wait(tokenizer: Tokenizer) -> None:
    """It waits, waits again since the engine that comes is drained, and is served at last: nothing cuts it off then."""

    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        fleet.frontend.replicas.get(0).drained = True
        fleet.kill(0)
        spec = Spec("cat", max_queue_time=0.1)
        live = await stack.enter_async_context(fleet.frontend.open(spec, "r", None))
        fleet.bring(0)
        first = live.queue_timer
        fleet.dispatch.engine_available()
        assert first.cancelled()
        fleet.frontend.resume_replica(0)
        assert live.queue_timer is None
        assert fleet.submit_of(live).request.queue_timeout <= 0.1


async def test_a_drained_engine_that_dies_comes_back_drained_and_one_that_is_replaced_does_not(
    tokenizer: Tokenizer,
) -> None:
    fleet = Fleet(tokenizer, engines=2)
    fleet.frontend.drain_replica(1)
    fleet.kill(1)
    fleet.bring(1)
    assert [replica.open for replica in fleet.frontend.replicas.newest] == [True, False]
    fleet.frontend.mark(fleet.frontend.serving(1), drained=False, leaving=True)
    fleet.kill(1)
    fleet.bring(1)
    assert [replica.open for replica in fleet.frontend.replicas.newest] == [True, True]


async def test_a_request_that_is_moved_says_where_it_was_and_one_whose_engine_died_does_not(
    tokenizer: Tokenizer,
) -> None:
    fleet = Fleet(tokenizer, engines=2)
    async with AsyncExitStack() as stack:
        (live,) = await opened(stack, fleet, 1)
        place = fleet.place_of(live)
        for number, engine in fleet.engines.items():
            engine.reach = Reach(f"unix:{number}", "token")
        fleet.frontend.drain_replica(place)
        assert fleet.submit_of(live).source is None, "it had not started: nothing of it was computed"
        fleet.frontend.resume_replica(place)
        fleet.tell(live, start=True)
        fleet.frontend.drain_replica(1 - place)
        assert fleet.submit_of(live).source == KVSource(f"unix:{1 - place}", "token")
        fleet.frontend.resume_replica(1 - place)
        fleet.tell(live, start=True)
        fleet.kill(place)
        assert fleet.submit_of(live).source is None
        fleet.tell(live, start=True)
        fleet.frontend.mark(fleet.frontend.serving(1 - place), drained=False, leaving=True)
        fleet.bring(1 - place)
        assert fleet.submit_of(live).source is None, "the engine that it was on makes way for the one it waits for"


@pytest.mark.parametrize("how", ["start", "end", "leave", "none", "not in time"])
async def test_an_engine_lives_until_what_it_had_has_moved(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("rpc.frontend.dispatch.MOVE_SECONDS", 0.1 if how == "not in time" else 20.0)

    fleet = Fleet(tokenizer, engines=2)
    async with AsyncExitStack() as stack:
        lives = await opened(stack, fleet, 4)
        for engine in fleet.engines.values():
            engine.reach = None if how == "none" else Reach("unix:engine")
        place = fleet.place_of(lives[0])
        moved = [live for live in lives if fleet.place_of(live) == place]
        for live in moved:
            fleet.tell(live, start=True)
        fleet.frontend.mark(fleet.frontend.serving(place), drained=False, leaving=True)
        waits = asyncio.create_task(fleet.frontend.until_moved())
        await asyncio.sleep(0.02)
        assert waits.done() == (how == "none")
        for live in moved if how in ("start", "end", "leave") else ():
            assert not waits.done()
            if how == "start":
                fleet.tell(live, start=True)
            elif how == "end":
                fleet.tell(live, end=EndReason.LENGTH)
            else:
                fleet.dispatch.forget(live)
        await waits


async def test_what_an_engine_says_when_it_is_let_go_of_counts_nothing_twice(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    engine = fleet.engines[0]
    engine.tell(replace(outputs(), stats=EngineStats(steps=7, pages_total=100)))
    fleet.frontend.detach(0)
    engine.tell(replace(outputs(), stats=EngineStats(steps=7, pages_total=100)))
    assert fleet.metrics.registry.get_sample_value("quire_engine_steps_total", {"model_name": "m"}) == 7


# The law, over any order of events.

ACTS = st.lists(
    st.sampled_from(["open", "token", "token", "token", "end", "kill", "bring", "cancel"]).flatmap(
        lambda act: st.tuples(st.just(act), st.integers(0, 5))
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(acts=ACTS, engines=st.integers(1, 3))
async def test_every_stream_gets_each_token_once_and_one_end(tokenizer: Tokenizer, acts: list, engines: int) -> None:
    """Engines draw position + 70: what a client sees must count up from there, however often they die."""

    fleet = Fleet(tokenizer, engines=engines, failover=1000.0)
    lives: list[Live] = []
    told: Counter[int] = Counter()  # by attempt
    async with AsyncExitStack() as stack:
        for number, (act, i) in enumerate(acts):
            placed = [v for v in lives if any(v.attempt in e.live for e in fleet.engines.values())]
            if act == "open" and fleet.engines:
                opening = fleet.frontend.open(Spec("cat"), f"r{number}", None)
                lives.append(await stack.enter_async_context(opening))
            elif act in ("token", "end") and placed:
                live = placed[i % len(placed)]
                known = fleet.submit_of(live).emitted
                at = (len(known[0] or ()) if known else 0) + told[live.attempt]
                told[live.attempt] += 1
                late = [(at - 1, 5)] if at and i % 2 else []  # what was there already is no news
                fleet.tell(live, *late, (at, 70 + at), end=EndReason.LENGTH if act == "end" else None, start=True)
            elif act == "kill" and fleet.engines:
                fleet.kill(sorted(fleet.engines)[i % len(fleet.engines)])
            elif act == "bring" and (missing := set(range(engines)) - fleet.engines.keys()):
                fleet.bring(min(missing))
            elif act == "cancel" and lives:
                fleet.dispatch.forget(lives[i % len(lives)])
        for number in set(range(engines)) - fleet.engines.keys():
            fleet.bring(number)
        for live in lives:
            tokens = live.stream.sequences[0].tokens
            assert tokens == [70 + i for i in range(len(tokens))]
            on = [number for number, engine in fleet.engines.items() if live.attempt in engine.live]
            assert len(on) <= 1
            if live.stream.ended:
                assert not on
                assert live.stream.failure is None or live.stream.failure.reason == "QUARANTINED"


async def test_stats_of_a_dead_engine_count_no_more(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=2)
    value = fleet.metrics.registry.get_sample_value
    assert value("quire_replicas", {"model_name": "m"}) == 2
    fleet.engines[1].tell(nothing(fleet.engines[1].stats))
    assert value("quire_kv_pages", {"model_name": "m"}) == 512
    fleet.kill(1)
    assert value("quire_kv_pages", {"model_name": "m"}) == 256
    assert value("quire_replicas", {"model_name": "m"}) == 1
