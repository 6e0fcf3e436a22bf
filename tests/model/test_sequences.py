"""Law: the sequences of one prompt share its pages, and each is what it would be if it ran alone."""

from pathlib import Path

import pytest

from scheduler.events import Abort, EndReason, Submit
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import BOTH, CHUNKED, PIPELINED, TIGHT, random_prompts
from tests.support.engines import Rig, key_of, make_request, make_rig

pytestmark = pytest.mark.sample(3)

COUNT, NEW, PAGE = 4, 20, 4
PROMPTS = random_prompts([1, 3, 4, 15, 16, 17, 40])
SAMPLED = {"temperature": 1.0, "seed": 5}


def run(directory: Path, scheduling: SchedulerSettings | None = None, pool: int = 4096, **kind: object) -> Rig:
    """Attempt i draws COUNT sequences of prompt i; one that draws a single one runs beside it."""
    rig = make_rig(directory, settings=scheduling, pool_tokens=pool, record_logits=True, **({"page_size": PAGE} | kind))
    requests = {i: make_request(rig, p, NEW, **SAMPLED, sequence_count=COUNT) for i, p in enumerate(PROMPTS)}
    rig.run(requests | {100 + i: make_request(rig, p, NEW) for i, p in enumerate(PROMPTS)})
    return rig


def outputs_of(rig: Rig) -> dict[object, tuple[list[int], dict[int, bytes]]]:
    return {key: (result.tokens, rig.logits_of(key)) for key, result in rig.results.items()}


@pytest.fixture(scope="module")
def together(tiny: Path) -> Rig:
    return run(tiny)


def test_every_sequence_ends_once_and_the_last_one_ends_the_attempt(together: Rig) -> None:
    for attempt in range(len(PROMPTS)):
        ends = [together.results[key_of(attempt, index)].end for index in range(COUNT)]
        assert [end.reason for end in ends if end is not None] == [EndReason.LENGTH] * COUNT
        assert sorted(end.more for end in ends if end is not None) == [False, True, True, True]


def test_sequences_differ(together: Rig) -> None:
    for attempt in range(len(PROMPTS)):
        assert len({tuple(together.results[key_of(attempt, index)].tokens) for index in range(COUNT)}) == COUNT


def test_each_sequence_is_what_it_is_alone(tiny: Path, together: Rig) -> None:
    for attempt, prompt in enumerate(PROMPTS):
        for index in (0, COUNT - 1):
            rig = make_rig(tiny, page_size=PAGE, record_logits=True)
            request = make_request(rig, prompt, NEW, **SAMPLED, sequence_count=COUNT)
            only = tuple(() if i == index else None for i in range(COUNT))
            results = rig.play({0: [Submit(attempt, request, only)]})
            key = key_of(attempt, index)
            assert results[key].tokens == together.results[key].tokens
            assert rig.logits_of(key) == together.logits_of(key)
            assert results[key].end is not None
            assert not results[key].end.more


SCHEDULES = {
    "chunked": {"scheduling": CHUNKED},
    "pipelined": {"scheduling": PIPELINED},
    "few rows": {"scheduling": TIGHT},
    "page of 1": {"page_size": 1},
    "page of 7": {"page_size": 7},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"scheduling": BOTH, "pool": 160},
    "preempted, page of 1": {"scheduling": BOTH, "pool": 130, "page_size": 1},
    "recompute": {"scheduling": SchedulerSettings(max_sequences=128, recompute=True)},
    "swapped": {"scheduling": BOTH, "pool": 160, "host_pages": 200},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_same_tokens_and_bits(tiny: Path, together: Rig, name: str) -> None:
    rig = run(tiny, **SCHEDULES[name])
    assert outputs_of(rig) == outputs_of(together)
    assert (rig.preemptions > 0) == ("pool" in SCHEDULES[name])


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_is_computed_once_and_its_pages_are_shared(tiny: Path, prefix_cache: bool) -> None:
    rig = make_rig(tiny, page_size=PAGE, prefix_cache=prefix_cache)
    prompt = random_prompts([41])[0]
    request = make_request(rig, prompt, NEW, **SAMPLED, sequence_count=COUNT)
    rig.turn([Submit(1, request)])
    stats = rig.scheduler.stats()
    assert (stats.pages_used, stats.pages_shared, stats.pages_if_copied) == (11, 11, 11 * COUNT)
    rig.turn()
    stats = rig.scheduler.stats()  # each has a last page of its own, which the first three have copied
    assert (stats.pages_used, stats.pages_shared, stats.pages_if_copied) == (10 + COUNT, 10, 11 * COUNT)
    rig.play({})
    assert rig.scheduler.stats().computed_tokens == len(prompt) + COUNT * (NEW - 1)


def test_sequences_of_one_token(tiny: Path) -> None:
    rig = make_rig(tiny, page_size=PAGE)
    results = rig.run({1: make_request(rig, PROMPTS[3], 1, **SAMPLED, sequence_count=COUNT)})
    assert {key: len(result.tokens) for key, result in results.items()} == {1: 1, (1, 1): 1, (1, 2): 1, (1, 3): 1}
    assert rig.scheduler.stats().computed_tokens == len(PROMPTS[3])


def test_a_sequence_goes_on_from_what_an_earlier_attempt_emitted(tiny: Path, together: Rig) -> None:
    """Two of three that still run have output; a fourth has ended."""
    for attempt, prompt in enumerate(PROMPTS):
        rig = make_rig(tiny, page_size=PAGE)
        whole = [together.results[key_of(attempt, index)].tokens for index in range(COUNT)]
        emitted = (None, tuple(whole[1][:7]), (), tuple(whole[3][:1]))
        request = make_request(rig, prompt, NEW, **SAMPLED, sequence_count=COUNT)
        results = rig.play({0: [Submit(attempt, request, emitted)]})
        assert [results[key_of(attempt, index)].tokens for index in (1, 2, 3)] == whole[1:]
        assert sum(not result.end.more for result in results.values() if result.end is not None) == 1


def test_an_attempt_whose_sequences_have_all_ended_ends(tiny: Path) -> None:
    rig = make_rig(tiny)
    request = make_request(rig, PROMPTS[0], 3, **SAMPLED, sequence_count=2)
    outputs = rig.turn([Submit(1, request, (None, None))])
    assert outputs is not None
    assert [(end.reason, end.more) for end in outputs.ends] == [(EndReason.FINISHED, False)]
    outputs = rig.turn([Submit(2, request, ((1, 2, 3), None))])
    assert outputs is not None
    assert [(end.reason, end.index, end.more) for end in outputs.ends] == [(EndReason.LENGTH, 0, False)]
    assert rig.scheduler.live_attempts() == []


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_one_sequence_is_finished_and_the_others_go_on(tiny: Path, together: Rig, turns: int) -> None:
    rig = make_rig(tiny, page_size=PAGE)
    request = make_request(rig, PROMPTS[4], NEW, **SAMPLED, sequence_count=COUNT)
    results = rig.play({0: [Submit(4, request)], turns + 1: [Abort(4, 2), Abort(4, 9), Abort(5, 0)]})
    assert results[4, 2].end is not None
    assert (results[4, 2].end.reason, results[4, 2].end.more) == (EndReason.FINISHED, True)
    assert len(results[4, 2].tokens) == turns + 1
    for index in (0, 1, 3):
        assert results[key_of(4, index)].tokens == together.results[key_of(4, index)].tokens


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_the_whole_attempt_is_finished(tiny: Path, turns: int) -> None:
    """Also while its prompt is being computed, in chunks of 8, and while it waits."""
    rig = make_rig(tiny, page_size=PAGE, settings=CHUNKED)
    submit = Submit(4, make_request(rig, PROMPTS[6], NEW, **SAMPLED, sequence_count=COUNT))
    results = rig.play({0: [submit], turns: [Abort(4)]} if turns else {0: [submit, Abort(4)]})
    (end,) = [result.end for result in results.values() if result.end is not None]
    assert (end.reason, end.more) == (EndReason.FINISHED, False)
    assert rig.scheduler.live_attempts() == []


def test_rows_are_kept_for_sequences_that_are_still_to_come(tiny: Path) -> None:
    """Five rows: a prompt for four sequences and one for two do not run at once, whatever comes between."""
    settings = SchedulerSettings(max_sequences=5, prefill_chunk=8, backfill_time=0.0)
    rig = make_rig(tiny, page_size=PAGE, settings=settings)
    requests = {
        1: make_request(rig, PROMPTS[6], NEW, **SAMPLED, sequence_count=4),
        2: make_request(rig, PROMPTS[3], NEW, **SAMPLED, sequence_count=2),
        3: make_request(rig, PROMPTS[2], NEW),
    }
    rig.turn([Submit(attempt, request) for attempt, request in requests.items()])
    assert rig.scheduler.rows.attempts() == [1]
    assert rig.scheduler.queue.attempts() == [2, 3]
    results = rig.play({})
    assert {key: len(result.tokens) for key, result in results.items()} == dict.fromkeys(
        [1, (1, 1), (1, 2), (1, 3), 2, (2, 1), 3], NEW
    )
