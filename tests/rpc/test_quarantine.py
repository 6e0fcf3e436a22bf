"""A request that kills an engine while it runs isolated fails; all others go on."""

from contextlib import AsyncExitStack

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.quarantine import PROBATION, TO_THE_END
from scheduler.events import Abort, EndReason, EngineStats, nothing
from scheduler.spec import Spec
from tests.support.fleet import Fleet, opened
from tests.support.frontends import outputs


async def test_suspects_wait_for_their_turn_but_not_for_ever_without_an_engine(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        first, second = await opened(stack, fleet, 2)
        fleet.restart()
        fleet.kill(0)
        assert first.failover_timer is not None
        assert second.failover_timer is not None
        fleet.bring(0)
        assert first.failover_timer is second.failover_timer is None, "there is an engine, on which the other one runs"
        fleet.frontend.mark(fleet.frontend.serving(0), drained=True, leaving=False)
        assert first.failover_timer is not None
        assert second.failover_timer is not None
        fleet.bring(1)
        assert first.failover_timer is second.failover_timer is None


async def test_after_two_deaths_it_runs_alone_until_it_has_come_further(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        lives = await opened(stack, fleet, 2)
        for _ in range(2):
            fleet.kill(0)
            assert fleet.bring(0).live <= {live.attempt for live in lives}
        first, second = lives
        assert fleet.engines[0].live == {first.attempt}, "the other one waits for its turn"
        assert (fleet.submit_of(first).isolated_steps, fleet.submit_of(first).again) == (PROBATION, True)
        fleet.tell(first, *((i, 70) for i in range(PROBATION - 1)), start=True)
        assert fleet.engines[0].live == {first.attempt}
        fleet.tell(first, (PROBATION - 1, 70))
        assert fleet.engines[0].live == {first.attempt, second.attempt}
        assert fleet.submit_of(second).isolated_steps == PROBATION
        fleet.tell(second, (0, 70), end=EndReason.LENGTH, start=True)
        assert second.stream.failure is None
        fleet.restart()
        assert fleet.submit_of(first).isolated_steps == 0, "suspicion begins anew"
        fleet.restart()
        assert fleet.submit_of(first).isolated_steps == TO_THE_END, "this time for all of it"


async def test_only_one_that_dies_alone_is_given_up_and_clears_the_others(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        lives = await opened(stack, fleet, 4)
        fleet.restart(times=2)
        guilty, *others = lives
        fleet.tell(guilty, start=True)
        fleet.kill(0)
        assert (guilty.stream.failure.code, guilty.stream.failure.reason) == ("INTERNAL", "QUARANTINED")
        engine = fleet.bring(0)
        assert engine.live == {live.attempt for live in others}, "all at once: they are cleared"
        assert {fleet.submit_of(live).isolated_steps for live in others} == {0}
    assert fleet.outcome("quarantined") == 1


async def test_bystanders_of_one_that_runs_alone_are_not_suspected(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        (suspect,) = await opened(stack, fleet, 1)
        fleet.restart(times=2)
        assert fleet.submit_of(suspect).isolated_steps == PROBATION
        bystander = await stack.enter_async_context(fleet.frontend.open(Spec("dog"), "b", None))
        fleet.kill(0)  # it has not said that the suspect runs: this time no request is blamed
        assert suspect.stream.failure is None
        fleet.bring(0)
        assert fleet.submit_of(bystander).isolated_steps == 0
        assert fleet.submit_of(suspect).isolated_steps == PROBATION
        fleet.kill(0)
        assert suspect.stream.failure.reason == "QUARANTINED", "but not without end"
        fleet.bring(0)
        assert fleet.submit_of(bystander).isolated_steps == 0


async def test_a_suspect_is_not_guilty_of_what_others_do_before_it_runs(tokenizer: Tokenizer) -> None:
    """They may be another frontend's: the suspect waits for them to end."""

    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        (suspect,) = await opened(stack, fleet, 1)
        fleet.restart(times=2)
        for _ in range(3):
            assert fleet.submit_of(suspect).isolated_steps == PROBATION
            fleet.engines[0].tell(nothing(EngineStats(running=2)))
            fleet.kill(0)
            assert suspect.stream.failure is None
            fleet.bring(0)


async def test_new_requests_keep_away_from_where_another_frontends_request_is_alone(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=2)
    async with AsyncExitStack() as stack:
        fleet.engines[0].tell(nothing(EngineStats(isolated=1)))
        lives = await opened(stack, fleet, 8)
        assert {fleet.place_of(live) for live in lives} == {1}
        fleet.kill(1)
        assert {fleet.place_of(live) for live in lives} == {0}, "there is no other"


async def test_new_requests_keep_away_from_an_engine_where_one_is_alone(tokenizer: Tokenizer) -> None:
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
            places.add(fleet.place_of(await stack.enter_async_context(fleet.frontend.open(Spec("x"), f"x{i}", None))))
        assert alone in places


async def test_a_suspect_that_leaves_makes_way_for_the_next(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        first, second, third = await opened(stack, fleet, 3)
        fleet.restart(times=2)
        fleet.dispatch.forget(second)
        gone = first.attempt
        fleet.dispatch.forget(first)
        assert Abort(gone) in fleet.engines[0].sent
        assert fleet.submit_of(third).isolated_steps == PROBATION


async def test_an_engine_that_tells_of_its_end_before_its_client_knows_dies_once(tokenizer: Tokenizer) -> None:
    """As over the link: the last message has the ends, and the stream breaks after it."""

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
        assert fleet.dispatch.quarantine.running is live, "this was its second death"
        assert fleet.submit_of(live).isolated_steps == PROBATION


async def test_a_suspect_waits_where_no_engine_takes_requests(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, engines=1)
    async with AsyncExitStack() as stack:
        (suspect,) = await opened(stack, fleet, 1)
        fleet.restart(times=2)
        assert fleet.submit_of(suspect).isolated_steps == PROBATION
        fleet.frontend.mark(fleet.frontend.serving(0), drained=False, leaving=True)
        assert fleet.dispatch.quarantine.waiting == [suspect]
        fleet.restart()
        assert fleet.submit_of(suspect).isolated_steps == PROBATION, "the new engine has it"
