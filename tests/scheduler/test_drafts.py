"""Draft tokens: which draws count, and that they change nothing but the number of steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from cache_manager.allocator import LedgerError
from cache_manager.manager import CacheManager
from scheduler.drafting import Drafting
from scheduler.drafts import LAST, Drafted, Ints, PromptLookup
from scheduler.events import EngineStats
from scheduler.rows import Rows
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from tests.scheduler.executor import VOCABULARY, FakeExecutor, alone, law, next_token
from tests.scheduler.play import play
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.planted import plant


def counting_plainly(rows: list[int], drafts: list[int], drawn: list[int]) -> list[bool]:
    """A draw counts where all before it of its row were the drafts that stood in their place."""
    counts = []
    for i, row in enumerate(rows):
        before = [j for j in range(i) if rows[j] == row]
        counts.append(all(drawn[j] == drafts[j] for j in before))
    return counts


@given(st.data())
def test_draws_count_up_to_the_first_that_differs(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=6))
    rows = [row for row, size in enumerate(sizes) for _ in range(size)]
    drafts = [
        data.draw(st.integers(0, 1)) if i + 1 < len(rows) and rows[i + 1] == row else LAST for i, row in enumerate(rows)
    ]
    drawn = [data.draw(st.integers(-2, 1)) for _ in rows]
    found = Drafted(np.array(rows, np.int32), np.array(drafts, np.int32)).counting(np.array(drawn, np.int32))
    assert found.tolist() == counting_plainly(rows, drafts, drawn)


@pytest.mark.parametrize(
    ("tokens", "most", "proposed"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 9, 1, 2], 9, [3, 4, 9, 1, 2]),
        ([5, 1, 2, 7, 6, 1, 2, 8, 4, 1, 2], 1, [8]),
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, [7]),  # three tokens are the same there, and two at the later place
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([3, 3, 3, 3], 4, [3]),
    ],
)
def test_prompt_lookup_goes_on_as_the_text_did(tokens: list[int], most: int, proposed: list[int]) -> None:
    assert PromptLookup().propose(np.array(tokens, np.int32), most).tolist() == proposed


class Guessing:
    """Proposes what the model would draw, but for some tokens: which depends on the sequence's tokens alone."""

    def __init__(self, workload: Workload) -> None:
        requests = [(a.request, index) for a in workload.arrivals for index in range(a.request.count)]
        self._outputs = [
            (one.prompt.tolist() + alone(one, index), index) for one, index in requests if one.beam is None
        ]

    def propose(self, tokens: Ints, most: int) -> Ints:
        known = tokens.tolist()
        found = [(own[len(known) :], i) for own, i in self._outputs if own[: len(known)] == known]
        law(found, "no sequence goes on as the drafter is told")
        after, index = found[0]
        drafts = [next_token(known + after[:i], index) for i in range(most)]  # also behind where the sequence ends
        wrong = sum(known) % (most + 2)
        drafts[wrong : wrong + 1] = [(token + 1) % VOCABULARY for token in drafts[wrong : wrong + 1]]
        return np.array(drafts, np.int32)


def run(workload: Workload, drafts: int) -> EngineStats:
    """Runs the workload with drafts of the `Guessing` drafter, under the laws of `play`."""
    workload = replace(workload, settings=replace(workload.settings, draft_tokens=drafts))
    scheduler = Scheduler(workload.settings, workload.queue, workload.cache, workload.hasher, Guessing(workload))
    play(workload, scheduler, FakeExecutor(workload.layout, workload.pages, workload.settings))
    return scheduler.stats()


@settings(max_examples=examples(150))
@given(workloads(cancels=True), st.integers(1, 5))
def test_tokens_do_not_depend_on_drafts(workload: Workload, drafts: int) -> None:
    run(workload, drafts)


@settings(max_examples=examples(60))
@given(workloads(several=True, resumed=True, resets=True), st.integers(1, 5))
def test_nor_beside_searches_and_several_sequences(workload: Workload, drafts: int) -> None:
    run(workload, drafts)


def test_right_guesses_save_steps() -> None:
    arrivals = (Arrival(1, 0, make_request(1, (3, 1, 4), 24)),)
    room = SchedulerSettings(max_batched_tokens=32, max_sequences=2)
    workload = Workload(arrivals, make_layout(4), 32, room)
    assert [run(workload, drafts).steps for drafts in (1, 4)] == [15, 8]


def all_count(_):
    return lambda self, drawn: np.ones(len(drawn), np.bool_)


def first_counts(_):
    return lambda self, drawn: np.append(True, self.rows[1:] != self.rows[:-1])[: len(drawn)]


def keep_all(_):
    return lambda self, row, length: None


def keep_a_page_less(real):
    return lambda self, row, length: real(self, row, max(0, length - self.layout.page_size))


def tell_nothing(real):
    return lambda self, row, computed, tokens, rejected: real(self, row, computed, tokens, 0)


def publish_all(real):
    def check(self, flown, result):
        checked, told = real(self, flown, result)
        return replace(checked, slices=flown.slices), told

    return check


def no_stops(real):
    return lambda self, rows, *drawn: (np.zeros(len(rows), np.bool_), real(self, rows, *drawn)[1])


def a_token_more(real):
    return lambda self, row, computed, tokens: real(self, row, computed + 1, tokens)


PLANTED = {
    "what is rejected counts": (Drafted, "counting", all_count),
    "none but the first counts": (Drafted, "counting", first_counts),
    "rejected pages are kept": (CacheManager, "truncate", keep_all),
    "a page too many goes": (CacheManager, "truncate", keep_a_page_less),
    "the executor keeps what a row drew last": (Drafting, "_settle", tell_nothing),
    "rejected tokens are published": (Drafting, "check", publish_all),
    "drafts behind a stop token count": (Rows, "ends", no_stops),
    "a rejected token is taken for computed": (Rows, "settle", a_token_more),
}


@pytest.mark.parametrize("name", PLANTED)
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`find` raises where no workload breaks a law."""
    plant(monkeypatch, *PLANTED[name])

    def breaks(workload: Workload) -> bool:
        try:
            run(workload, 3)
        except (AssertionError, LedgerError, LookupError, ValueError):
            return True
        return False

    find(workloads(depths=(1,)), breaks, settings=settings(max_examples=400, database=None, phases=[Phase.generate]))
