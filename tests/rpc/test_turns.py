"""Threads that tenants use in turn: whose call is next, and that no thread is lost."""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rpc.frontend.turns import TurnExecutor
from tests.support.examples import examples

Call = tuple[str, int]


def in_turns(asked: Sequence[Call]) -> list[Call]:
    """The rule in plain words: each round has the oldest call of each tenant that still has one."""
    left, order = list(asked), list[Call]()
    while left:
        tenants = dict.fromkeys(tenant for tenant, _ in left)
        for tenant in tenants:
            first = next(call for call in left if call[0] == tenant)
            left.remove(first)
            order.append(first)
    return order


class Busy:
    """An executor of one thread, which is taken until the block ends."""

    def __init__(self) -> None:
        self.turns = TurnExecutor(1, "turns")
        self._begun, self.may_end = threading.Event(), threading.Event()

    def hold(self) -> None:
        self._begun.set()
        assert self.may_end.wait(60)

    async def __aenter__(self) -> "Busy":
        self.holding = asyncio.create_task(self.turns.run(self.hold, "holder"))
        await asyncio.to_thread(self._begun.wait, 60)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.may_end.set()
        await asyncio.gather(self.holding, return_exceptions=True)
        self.turns.shutdown()


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.sets(st.integers(0, 11), max_size=4))
@example(["a", "a", "a", "b"], set())
@example(["a", "b", "b"], {0})
def test_each_round_has_one_call_of_each_tenant(tenants: list[str], cancelled: set[int]) -> None:
    async def run() -> list[Call]:
        ran = list[Call]()
        async with Busy() as busy:
            calls = [(tenant, number) for number, tenant in enumerate(tenants)]
            tasks = [asyncio.create_task(busy.turns.run(partial(ran.append, call), call[0])) for call in calls]
            await asyncio.sleep(0)
            for number in cancelled & set(range(len(tasks))):
                tasks[number].cancel()
            await asyncio.sleep(0)
            busy.may_end.set()
            await asyncio.gather(*tasks, return_exceptions=True)
        return ran

    left = [(tenant, number) for number, tenant in enumerate(tenants) if number not in cancelled]
    # A tenant keeps its place where its first call is cancelled and another one waits.
    places = dict.fromkeys(tenant for tenant in tenants if tenant in {whose for whose, _ in left})
    rounds = in_turns(left)
    expected = sorted(rounds, key=lambda call: (_round(rounds, call), list(places).index(call[0])))
    assert asyncio.run(run()) == expected


def _round(rounds: Sequence[Call], call: Call) -> int:
    return sum(1 for other in rounds[: rounds.index(call)] if other[0] == call[0])


async def test_a_call_that_nobody_waits_for_any_more_keeps_its_thread() -> None:
    async with Busy() as busy:
        busy.holding.cancel()
        await asyncio.gather(busy.holding, return_exceptions=True)
        next_one = asyncio.create_task(busy.turns.run(lambda: busy.may_end.is_set(), "b"))
        await asyncio.sleep(0)
        assert not next_one.done()
        busy.may_end.set()
        assert await next_one, "it ran beside the other one"


async def test_no_thread_is_lost_with_a_call_that_leaves_as_it_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Busy() as busy:
        given_up = asyncio.create_task(busy.turns.run(lambda: 1, "a"))
        other = asyncio.create_task(busy.turns.run(lambda: 2, "b"))
        await asyncio.sleep(0)
        loop, ended = asyncio.get_running_loop(), threading.Semaphore(0)
        real = loop.call_soon_threadsafe

        def counted(*arguments: Any, **options: Any) -> Any:
            made = real(*arguments, **options)
            ended.release()
            return made

        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_soon_threadsafe", counted)
            busy.may_end.set()
            for _ in range(2):  # the thread gives itself back, and its result; the loop stands still meanwhile
                assert ended.acquire(timeout=60)
            loop.call_soon(given_up.cancel)
        await asyncio.gather(given_up, return_exceptions=True)
        async with asyncio.timeout(60):
            assert await other == 2


async def test_an_exception_is_the_caller_s_and_frees_the_thread() -> None:
    turns = TurnExecutor(1, "turns")

    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await turns.run(fails, "a")
    assert await turns.run(lambda: 3, "a") == 3
    turns.shutdown()


async def test_shutting_down_cancels_the_calls_that_wait() -> None:
    ran = list[int]()
    async with Busy() as busy:
        waiting = [asyncio.create_task(busy.turns.run(lambda: ran.append(1), tenant)) for tenant in "aab"]
        await asyncio.sleep(0)
        busy.turns.shutdown()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
    assert not ran
    with pytest.raises(asyncio.CancelledError):
        await busy.turns.run(lambda: ran.append(1), "a")
    assert not ran
