"""What an engine tells of its prefix cache is what is in it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.name_log import NameLog
from scheduler.events import SHORT_NAME, Ask, Event, Question, StepOutputs, Submit, short_names
from scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import engine, step
from tests.scheduler.workloads import make_request

prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24).map(tuple)


def telling(pages: int) -> Scheduler:
    scheduler = engine(rows=3, pages=pages, page_size=2, prefix_cache=True)
    scheduler.cache.prefix.index.log = NameLog()
    return scheduler


def mirrored(held: set[bytes], outputs: StepOutputs) -> set[bytes]:
    for change in outputs.names:
        gone = set(short_names(change.removed))
        assert gone <= held, "a name is taken back that was never told"
        held = held - gone | set(short_names(change.added))
    return held


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=12), st.integers(14, 40), st.integers(0, 12))
def test_who_listens_knows_every_name(texts: list[tuple[int, ...]], pages: int, reset: int) -> None:
    scheduler, held = telling(pages), set[bytes]()
    for attempt, text in enumerate(texts):
        events: list[Event] = [Submit(attempt, make_request(attempt, text, max_tokens=3))]
        if attempt == reset:
            events.append(Ask(1, Question.RESET_PREFIX_CACHE))
        for _ in range(2):
            held = mirrored(held, step(scheduler, 0.0, events))
            events = []
            assert held == {name[:SHORT_NAME] for name in scheduler.cache.prefix.index._node_named}
    while scheduler.has_work:
        held = mirrored(held, step(scheduler))
    assert held == {name[:SHORT_NAME] for name in scheduler.cache.prefix.index._node_named}


def test_nobody_is_told_who_does_not_ask() -> None:
    scheduler = engine(page_size=2, prefix_cache=True)
    outputs = [step(scheduler, 0.0, [Submit(1, make_request(1, (1,) * 9, max_tokens=2))]), step(scheduler)]
    assert len(scheduler.cache.prefix.index)
    assert [o.names for o in outputs] == [(), ()]
