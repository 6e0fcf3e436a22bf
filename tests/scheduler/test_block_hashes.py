"""KV events of an engine add up to its prefix cache, and pages of decoding rows have the hashes of their tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import BlockHasher
from cache_manager.kv_events import KVEventLog
from scheduler.events import SHORT_HASH, AdminQuery, AdminQuestion, Event, StepOutputs, Submit, short_hashes
from scheduler.rows import Rows, Sequence
from scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import engine, step
from tests.scheduler.workloads import make_request
from tests.support.examples import examples

prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24).map(tuple)


def telling(pages: int) -> Scheduler:
    scheduler = engine(rows=3, pages=pages, page_size=2, prefix_cache=True)
    scheduler.cache.prefix.index.log = KVEventLog()
    return scheduler


def mirrored(held: set[bytes], outputs: StepOutputs) -> set[bytes]:
    for change in outputs.kv_events:
        gone = set(short_hashes(change.removed))
        assert gone <= held, "a name is taken back that was never told"
        held = held - gone | set(short_hashes(change.added))
    return held


def known(scheduler: Scheduler) -> set[bytes]:
    """Short hashes of all pages that the prefix cache has."""
    index = scheduler.cache.prefix.index
    return {name[:SHORT_HASH] for name in index.hashes(index.all())}


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(prompts, min_size=1, max_size=12), st.integers(14, 40), st.integers(0, 12))
def test_who_listens_knows_every_name(texts: list[tuple[int, ...]], pages: int, reset: int) -> None:
    scheduler, held = telling(pages), set[bytes]()
    for attempt, text in enumerate(texts):
        events: list[Event] = [Submit(attempt, make_request(attempt, text, max_tokens=3))]
        if attempt == reset:
            events.append(AdminQuery(1, AdminQuestion.RESET_PREFIX_CACHE))
        for _ in range(2):
            held = mirrored(held, step(scheduler, 0.0, events))
            events = []
            assert held == known(scheduler)
    while scheduler.has_work:
        held = mirrored(held, step(scheduler))
    assert held == known(scheduler)


def test_nobody_is_told_who_does_not_ask() -> None:
    scheduler = engine(page_size=2, prefix_cache=True)
    outputs = [step(scheduler, 0.0, [Submit(1, make_request(1, (1,) * 9, max_tokens=2))]), step(scheduler)]
    assert len(scheduler.cache.prefix.index)
    assert [o.kv_events for o in outputs] == [(), ()]


@pytest.mark.parametrize("prompt", range(4, 13))
def test_the_next_page_has_the_hash_of_its_tokens_wherever_the_prompt_ends(prompt: int) -> None:
    size, tokens, hasher = 4, np.arange(7, 31, dtype=np.int32), BlockHasher(bytes(32), b"", 4)
    rows, all_hashes = Rows(2), hasher.chain()
    all_hashes.extend(tokens)
    request = make_request(0, tuple(tokens[:prompt].tolist()), max_tokens=30)
    sequence = Sequence(0, request, tokens[:0], 0.0, 0, chain=hasher.chain(request.scope))
    row, chain = rows.add(sequence), sequence.chain
    assert chain is not None
    rows.hash_pages(row, prompt, size)
    for length in range(prompt + 1, len(tokens) + 1):
        rows.append(np.array([row]), tokens[length - 1 : length])
        if length % size == 0:
            rows.hash_next(np.array([row], np.int32), np.array([length // size], np.int32), size)
        assert chain.hashes == all_hashes.hashes[: length // size]
        assert chain.contents == all_hashes.contents[: length // size]
