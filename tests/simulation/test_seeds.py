"""Whatever the faults, the clients and the settings, the laws of a deployment hold, seed after seed."""

import re
from collections.abc import Callable

import pytest

from cache_manager.manager import CacheManager
from rpc.frontend.replicas import Replica
from rpc.simulation.cluster import Cluster
from rpc.simulation.engine import SimulatedEngine
from scheduler.backpressure import Backpressure, Refusal
from scheduler.events import Abort
from tests.scheduler.executor import LawBroken
from tests.simulation.seeds import check, check_all
from tests.support.planted import plant

QUICK = 50
SLOW = 2_000  # 50 s of one core; 10,000 took 252 s: `python -m tests.simulation.seeds 0 --count 10000`
SEARCHED = 300  # seeds of which one has to show a planted fault


def test_the_laws_hold() -> None:
    """`check` raises where they do not. The draws reach what the laws are about."""
    happened = check_all(range(QUICK))
    for name in ("length", "stop", "finished", "queue_full", "queue_timeout", "moved", "preempted"):
        assert happened[name], name
    for name in ("left", "cut off", "grown", "prefix hits"):
        assert happened[name], name


@pytest.mark.slow
def test_the_laws_hold_for_many_seeds() -> None:
    """`check` raises where they do not."""
    check_all(range(QUICK, SLOW))


def without_those_of_dead_engines(real):
    return lambda self, left, now: real(self, left[1:], now)


def without_their_tokens(real):
    def go_on(self, left, now):
        tokens = self.ledger.tokens.copy()
        self.ledger.tokens[:] = 0
        real(self, left, now)
        self.ledger.tokens[:] = tokens

    return go_on


def nobody_leaves(real):
    return lambda self, event, now: None if isinstance(event, Abort) else real(self, event, now)


def refused_without_a_word(real):
    def refuse(self, *arguments):
        return None if real(self, *arguments) is None else Refusal("", 1.0)

    return refuse


def keeps_a_page(real):
    def release(self, row, after_step):
        if row != 1:
            real(self, row, after_step)

    return release


def attempts_stay(real):
    return lambda self, attempt: None


def ended_engines_report(real):
    def end(self, node, now):
        left = real(self, node, now)
        node.ended, node.dead_since = False, None
        return left

    return end


FAULTS: dict[Callable, tuple[type, str]] = {
    without_those_of_dead_engines: (Cluster, "_go_on"),
    without_their_tokens: (Cluster, "_go_on"),
    ended_engines_report: (Cluster, "_end"),
    nobody_leaves: (SimulatedEngine, "put"),
    refused_without_a_word: (Backpressure, "refuse"),
    keeps_a_page: (CacheManager, "release"),
    attempts_stay: (Replica, "attempt_ended"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_the_message_repeats_it(fault: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *FAULTS[fault], fault)
    with pytest.raises(LawBroken) as found:
        check_all(range(SEARCHED))
    named = re.search(r"^seed (\d+): .*; repeat it: python -m tests\.simulation\.seeds \1$", str(found.value))
    assert named is not None
    with pytest.raises(LawBroken) as again:
        check(int(named[1]))
    assert str(again.value) == str(found.value)
    monkeypatch.undo()
    check(int(named[1]))
