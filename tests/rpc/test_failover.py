"""Requests whose engine dies go on with another one: no gap, no duplicate, and nobody pays for what engines die of."""

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
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.suspects import PROBATION, TO_THE_END
from rpc.observe.metrics import Metrics
from scheduler.events import End, EndReason, EngineStats, Finish, Source, StepOutputs, Submit, nothing
from scheduler.limits import ModelDefaults
from scheduler.request import Beam, Sampling, Spec, Stopping
from tests.support.frontends import outputs
from tests.support.links import MortalEngine, eventually, run


class Fleet:
    """A frontend over puppets, which a test kills and brings back."""

    def __init__(self, tokenizer: Tokenizer, engines: int = 2, **settings: float) -> None:
        self.metrics = Metrics("m")
        preparer = Preparer("m", tokenizer, ModelDefaults(eos_token_ids=(0,)))
        self.frontend = Frontend(preparer, FrontendSettings(**settings), self.metrics)
        self.dispatch = self.frontend._dispatch
        self.engines: dict[int, MortalEngine] = {}
        for number in range(engines):
            self.bring(number)

    def bring(self, number: int) -> MortalEngine:
        replica = self.frontend.replicas.new(number)
        self.frontend._coming[number] = replica
        engine = self.engines[number] = MortalEngine(lambda step: self.dispatch.deliver(step, replica))
        self.frontend.attach(engine, number)
        return engine

    def kill(self, number: int) -> None:
        engine = self.engines.pop(number)
        engine.die("killed")
        self.frontend.detach(number)

    def place_of(self, live: Live) -> int:
        """The engine that has it now."""
        (number,) = [n for n, engine in self.engines.items() if live.attempt in engine.live]
        return number

    def submit_of(self, live: Live) -> Submit:
        """What its engine was told of it."""
        sent = self.engines[self.place_of(live)].sent
        (submit,) = [e for e in sent if isinstance(e, Submit) and e.attempt == live.attempt]
        return submit

    def tell(self, live: Live, *tokens: tuple[int, int], end: EndReason | None = None, start: bool = False) -> None:
        """Its engine gives (position, token)s of its first sequence."""
        attempt = live.attempt
        ends = [(attempt, end)] if end is not None else []
        starts = [attempt] if start else []
        self.engines[self.place_of(live)].tell(outputs([(attempt, *token) for token in tokens], ends, starts))

    def outcome(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value("quire_requests_total", {"model_name": "m", "outcome": name})


CAT = Spec("cat")


async def opened(stack: AsyncExitStack, fleet: Fleet, count: int, spec: Spec = CAT) -> list[Live]:
    return [await stack.enter_async_context(fleet.frontend.open(spec, f"r{i}", None)) for i in range(count)]


def test_a_stream_goes_on_where_it_was_and_zombies_are_not_heard(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer)
        async with AsyncExitStack() as stack:
            (live,) = await opened(stack, fleet, 1)
            fleet.tell(live, (0, 70), (1, 71), start=True)
            place, attempt = fleet.place_of(live), live.attempt
            zombie = fleet.engines[place]
            fleet.kill(place)
            submit = fleet.submit_of(live)
            assert (submit.emitted, submit.again, submit.alone) == (((70, 71),), True, 0)
            assert submit.attempt != attempt
            zombie.tell(outputs([(attempt, 2, 99)], [(attempt, EndReason.LENGTH)]))
            fleet.tell(live, (2, 72), end=EndReason.LENGTH, start=True)
            (delta,) = live.stream.take()
            assert delta.token_ids == [70, 71, 72]
        assert fleet.outcome("length") == 1
        value = fleet.metrics.registry.get_sample_value
        assert value("quire_request_queue_time_seconds_count", {"model_name": "m"}) == 1, "it started once"

    run(test())


def test_what_of_several_sequences_is_over_is_not_asked_for_again(tokenizer: Tokenizer) -> None:
    spec = Spec("cat", sampling=Sampling(sequence_count=3, temperature=1.0), stopping=Stopping(stop=("G",)))

    def three(attempt: int, *tokens: tuple[int, int, int], ends: Sequence[End] = ()) -> StepOutputs:
        step = outputs([(attempt, position, token) for _, position, token in tokens])
        indices = np.array([index for index, _, _ in tokens], np.int32)
        return StepOutputs(**{f: getattr(step, f) for f in step.__slots__} | {"indices": indices, "ends": tuple(ends)})

    async def test() -> None:
        fleet = Fleet(tokenizer)
        stop = tokenizer.encode("G", add_special_tokens=False)[0]
        async with AsyncExitStack() as stack:
            (live,) = await opened(stack, fleet, 1, spec)
            engine = fleet.engines[fleet.place_of(live)]
            ends = [End(live.attempt, EndReason.LENGTH, index=2, more=True)]
            engine.tell(three(live.attempt, (0, 0, stop), (1, 0, 70), (2, 0, 71), (1, 1, 72), ends=ends))
            fleet.kill(fleet.place_of(live))
            assert fleet.submit_of(live).emitted == (None, (70, 72), None)

    run(test())


def test_a_search_starts_again(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer)
        async with AsyncExitStack() as stack:
            (live,) = await opened(stack, fleet, 1, Spec("cat", sampling=Sampling(beam=Beam(2))))
            fleet.kill(fleet.place_of(live))
            assert fleet.submit_of(live).emitted == ()

    run(test())


def test_who_has_started_waits_without_limit_and_who_has_not_as_long_as_was_left(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            served, waiting = await opened(stack, fleet, 2, Spec("cat", max_queue_time=50.0))
            fleet.tell(served, start=True)
            fleet.kill(0)
            fleet.bring(0)
            assert fleet.submit_of(served).request.patience is None
            assert 0 < fleet.submit_of(waiting).request.patience <= 50.0

    run(test())


def test_without_an_engine_they_wait_for_one_and_not_for_ever(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1, failover=0.05)
        async with AsyncExitStack() as stack:
            goes_on, leaves = await opened(stack, fleet, 2)
            fleet.kill(0)
            assert not goes_on.stream.ended
            fleet.frontend._dispatch.forget(leaves)
            engine = fleet.bring(0)
            assert engine.submitted() == [goes_on.attempt], "who has left meanwhile is not brought back"
            await asyncio.sleep(0.1)
            assert not goes_on.stream.ended, "it waits no longer"
            fleet.kill(0)
            await eventually(lambda: goes_on.stream.ended)
            assert (goes_on.stream.failure.code, goes_on.stream.failure.reason) == ("UNAVAILABLE", "ENGINE_FAILED")
            assert "within 0.05 s" in goes_on.stream.failure.message

    run(test())


def test_a_server_that_ends_takes_its_requests_with_it(tokenizer: Tokenizer) -> None:
    async def test() -> None:
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

    run(test())


# Requests that engines die of.


def test_after_two_deaths_it_runs_alone_until_it_has_come_further(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            lives = await opened(stack, fleet, 2)
            for _ in range(2):
                fleet.kill(0)
                assert fleet.bring(0).live <= {live.attempt for live in lives}
            first, second = lives
            assert fleet.engines[0].live == {first.attempt}, "the other one waits for its turn"
            assert (fleet.submit_of(first).alone, fleet.submit_of(first).again) == (PROBATION, True)
            fleet.tell(first, *((i, 70) for i in range(PROBATION - 1)), start=True)
            assert fleet.engines[0].live == {first.attempt}
            fleet.tell(first, (PROBATION - 1, 70))
            assert fleet.engines[0].live == {first.attempt, second.attempt}
            assert fleet.submit_of(second).alone == PROBATION
            fleet.tell(second, (0, 70), end=EndReason.LENGTH, start=True)
            assert second.stream.failure is None
            fleet.kill(0)
            fleet.bring(0)
            assert fleet.submit_of(first).alone == 0, "suspicion begins anew"
            fleet.kill(0)
            fleet.bring(0)
            assert fleet.submit_of(first).alone == TO_THE_END, "this time for all of it"

    run(test())


def test_only_one_that_dies_alone_is_given_up_and_clears_the_others(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            lives = await opened(stack, fleet, 4)
            for _ in range(2):
                fleet.kill(0)
                fleet.bring(0)
            guilty, *others = lives
            fleet.tell(guilty, start=True)
            fleet.kill(0)
            assert (guilty.stream.failure.code, guilty.stream.failure.reason) == ("INTERNAL", "QUARANTINED")
            engine = fleet.bring(0)
            assert engine.live == {live.attempt for live in others}, "all at once: they are cleared"
            assert {fleet.submit_of(live).alone for live in others} == {0}
        assert fleet.outcome("quarantined") == 1

    run(test())


def test_bystanders_of_one_that_runs_alone_are_not_suspected(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            (suspect,) = await opened(stack, fleet, 1)
            for _ in range(2):
                fleet.kill(0)
                fleet.bring(0)
            assert fleet.submit_of(suspect).alone == PROBATION
            bystander = await stack.enter_async_context(fleet.frontend.open(Spec("dog"), "b", None))
            fleet.kill(0)  # it has not said that the suspect runs: this time nobody is blamed
            assert suspect.stream.failure is None
            fleet.bring(0)
            assert fleet.submit_of(bystander).alone == 0
            assert fleet.submit_of(suspect).alone == PROBATION
            fleet.kill(0)
            assert suspect.stream.failure.reason == "QUARANTINED", "but not without end"
            fleet.bring(0)
            assert fleet.submit_of(bystander).alone == 0

    run(test())


def test_a_suspect_is_not_guilty_of_what_others_do_before_it_runs(tokenizer: Tokenizer) -> None:
    """Of another frontend, say: it waits for them to end."""

    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            (suspect,) = await opened(stack, fleet, 1)
            for _ in range(2):
                fleet.kill(0)
                fleet.bring(0)
            for _ in range(3):
                assert fleet.submit_of(suspect).alone == PROBATION
                fleet.engines[0].tell(nothing(EngineStats(running=2)))
                fleet.kill(0)
                assert suspect.stream.failure is None
                fleet.bring(0)

    run(test())


def test_new_requests_keep_away_from_where_another_frontends_request_is_alone(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=2)
        async with AsyncExitStack() as stack:
            fleet.engines[0].tell(nothing(EngineStats(isolated=1)))
            lives = await opened(stack, fleet, 8)
            assert {fleet.place_of(live) for live in lives} == {1}
            fleet.kill(1)
            assert {fleet.place_of(live) for live in lives} == {0}, "there is no other"

    run(test())


def test_new_requests_keep_away_from_an_engine_where_one_is_alone(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=2)
        async with AsyncExitStack() as stack:
            (suspect,) = await opened(stack, fleet, 1)
            for _ in range(2):
                number = fleet.place_of(suspect)
                fleet.kill(number)
                fleet.bring(number)
            alone = fleet.place_of(suspect)
            for i in range(8):
                live = await stack.enter_async_context(fleet.frontend.open(Spec("dog"), f"d{i}", None))
                assert fleet.place_of(live) != alone
            fleet.tell(suspect, (0, 70), end=EndReason.LENGTH, start=True)
            places = set()
            for i in range(8):
                places.add(
                    fleet.place_of(await stack.enter_async_context(fleet.frontend.open(Spec("x"), f"x{i}", None)))
                )
            assert alone in places

    run(test())


def test_a_suspect_that_leaves_makes_way_for_the_next(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            first, second, third = await opened(stack, fleet, 3)
            for _ in range(2):
                fleet.kill(0)
                fleet.bring(0)
            fleet.dispatch.forget(second)
            gone = first.attempt
            fleet.dispatch.forget(first)
            assert Finish(gone) in fleet.engines[0].sent
            assert fleet.submit_of(third).alone == PROBATION

    run(test())


def test_an_engine_that_tells_of_its_end_before_its_client_knows_dies_once(tokenizer: Tokenizer) -> None:
    """As over the link: the last message has the ends, and the stream breaks after it."""

    async def test() -> None:
        fleet = Fleet(tokenizer, engines=2)
        async with AsyncExitStack() as stack:
            (live,) = await opened(stack, fleet, 1)
            place, attempt = fleet.place_of(live), live.attempt
            dying = fleet.engines.pop(place)
            dying.tell(outputs(ends=[(attempt, EndReason.ENGINE_FAILED)]))
            assert dying.submitted() == [attempt], "it is not sent back to where it comes from"
            dying.die("the link broke")
            fleet.frontend.detach(place)
            fleet.bring(place)
            fleet.kill(fleet.place_of(live))
            assert fleet.dispatch._suspects.running is live, "this was its second death"
            assert fleet.submit_of(live).alone == PROBATION

    run(test())


def test_a_suspect_waits_where_no_engine_takes_requests(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            (suspect,) = await opened(stack, fleet, 1)
            for _ in range(2):
                fleet.kill(0)
                fleet.bring(0)
            assert fleet.submit_of(suspect).alone == PROBATION
            fleet.frontend.mark(fleet.frontend.serving(0), drained=False, leaving=True)
            assert fleet.dispatch._suspects.waiting == [suspect]
            fleet.kill(0)
            fleet.bring(0)
            assert fleet.submit_of(suspect).alone == PROBATION, "the new engine has it"

    run(test())


def test_each_time_without_an_engine_has_its_own_limit(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1, failover=0.03)
        async with AsyncExitStack() as stack:
            (first,) = await opened(stack, fleet, 1)
            fleet.kill(0)
            await eventually(lambda: first.stream.ended)
            second = await stack.enter_async_context(fleet.frontend.open(CAT, "second", None))
            await eventually(lambda: second.stream.ended)
            assert second.stream.failure.reason == "ENGINE_FAILED"

    run(test())


def test_patience_ends_where_there_is_no_engine_too(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        fleet.kill(0)
        async with AsyncExitStack() as stack:
            spec = Spec("cat", max_queue_time=0.02)
            live = await stack.enter_async_context(fleet.frontend.open(spec, "r", None))
            await eventually(lambda: live.stream.ended)
            assert (live.stream.failure.code, live.stream.failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT")

    run(test())


def test_patience_that_began_twice_ends_with_the_wait(tokenizer: Tokenizer) -> None:
    """It waits, waits again since the engine that comes is drained, and is served at last: nothing cuts it off then."""

    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        async with AsyncExitStack() as stack:
            fleet.frontend.replicas.get(0).drained = True
            fleet.kill(0)
            spec = Spec("cat", max_queue_time=0.1)
            live = await stack.enter_async_context(fleet.frontend.open(spec, "r", None))
            fleet.bring(0)
            first = live.waits
            fleet.dispatch.engine_came()
            assert first.cancelled()
            fleet.frontend.resume_replica(0)
            assert live.waits is None
            assert fleet.submit_of(live).request.patience <= 0.1

    run(test())


def test_a_drained_engine_that_dies_comes_back_drained_and_one_that_is_replaced_does_not(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=2)
        fleet.frontend.drain_replica(1)
        fleet.kill(1)
        fleet.bring(1)
        assert [replica.open for replica in fleet.frontend.replicas.newest] == [True, False]
        fleet.frontend.mark(fleet.frontend.serving(1), drained=False, leaving=True)
        fleet.kill(1)
        fleet.bring(1)
        assert [replica.open for replica in fleet.frontend.replicas.newest] == [True, True]

    run(test())


def test_a_request_that_is_moved_says_where_it_was_and_one_whose_engine_died_does_not(tokenizer: Tokenizer) -> None:
    async def test() -> None:
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
            assert fleet.submit_of(live).source == Source(f"unix:{1 - place}", "token")
            fleet.frontend.resume_replica(1 - place)
            fleet.tell(live, start=True)
            fleet.kill(place)
            assert fleet.submit_of(live).source is None
            fleet.tell(live, start=True)
            fleet.frontend.mark(fleet.frontend.serving(1 - place), drained=False, leaving=True)
            fleet.bring(1 - place)
            assert fleet.submit_of(live).source is None, "the engine that it was on makes way for the one it waits for"

    run(test())


@pytest.mark.parametrize("how", ["start", "end", "leave", "none", "not in time"])
def test_an_engine_lives_until_what_it_had_has_moved(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("rpc.frontend.dispatch.MOVE_SECONDS", 0.1 if how == "not in time" else 20.0)

    async def test() -> None:
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

    run(test())


def test_what_an_engine_says_when_it_is_let_go_of_counts_nothing_twice(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=1)
        engine = fleet.engines[0]
        engine.tell(replace(outputs(), stats=EngineStats(steps=7, pages_total=100)))
        fleet.frontend.detach(0)
        engine.tell(replace(outputs(), stats=EngineStats(steps=7, pages_total=100)))
        assert fleet.metrics.registry.get_sample_value("quire_engine_steps_total", {"model_name": "m"}) == 7

    run(test())


# The law, over any order of events.

ACTS = st.lists(
    st.sampled_from(["open", "token", "token", "token", "end", "kill", "bring", "cancel"]).flatmap(
        lambda act: st.tuples(st.just(act), st.integers(0, 5))
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(acts=ACTS, engines=st.integers(1, 3))
def test_every_stream_gets_each_token_once_and_one_end(tokenizer: Tokenizer, acts: list, engines: int) -> None:
    """Engines draw position + 70: what a client sees must count up from there, however often they die."""

    async def test() -> None:
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

    run(test())


def test_stats_of_a_dead_engine_count_no_more(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        fleet = Fleet(tokenizer, engines=2)
        value = fleet.metrics.registry.get_sample_value
        assert value("quire_replicas", {"model_name": "m"}) == 2
        fleet.engines[1].tell(nothing(fleet.engines[1].stats))
        assert value("quire_kv_pages", {"model_name": "m"}) == 512
        fleet.kill(1)
        assert value("quire_kv_pages", {"model_name": "m"}) == 256
        assert value("quire_replicas", {"model_name": "m"}) == 1

    run(test())
