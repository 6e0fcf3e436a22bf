"""Law: every family gives the ids and log-probabilities that transformers gives, and no schedule changes a bit."""

from pathlib import Path

import pytest

from model.config import read_config
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import CASES, Case
from tests.model.families.conftest import Shelf
from tests.model.families.parity import Answer, compare
from tests.model.families.prompts import ALIKE, FEW, PROMPTS
from tests.model.families.reference import NEW
from tests.model.test_parity import BOTH, CHUNKED, PIPELINED, Schedule, bits_of, tokens_of
from tests.support.engines import Rig, make_request, make_rig

each_case = pytest.mark.parametrize("case", CASES, ids=str)
FIRST = {case.family: case for case in reversed(CASES)}  # of each family
each_family = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if FIRST[case.family] is case else [pytest.mark.slow]) for case in CASES],
    ids=str,
)
"""The others are slow: each of them is compared with transformers, and preempted, in any run."""
SOME = 24  # tokens of an output that schedules go on to
LONGEST = max(map(len, PROMPTS)) + SOME
FEW_PROMPTS = [PROMPTS[i] for i in FEW]
NARROW = SchedulerSettings(max_sequences=8, max_batched_tokens=27, prefill_chunk=13, steps_in_flight=2)


def same(rig: Rig, places: dict[int, int], together: Answer) -> None:
    """places: of the prompts that the attempts ran."""
    for attempt, place in places.items():
        assert rig.results[attempt].tokens == together.rig.results[place].tokens[:SOME]
        expected = together.rig.logits_of(place)
        assert rig.logits_of(attempt) == {position: expected[position] for position in range(SOME)}


@each_case
def test_tokens_and_logprobs_are_those_of_transformers(case: Case, shelf: Shelf) -> None:
    compare(shelf.answer(case), shelf.reference(case))


@each_family
def test_alone_is_as_in_a_batch(case: Case, shelf: Shelf) -> None:
    rig = make_rig(shelf.checkpoint(case), record_logits=True, prefix_cache=False)
    places = (FEW[0], FEW[2], FEW[-2], FEW[-1])
    for place in places:
        rig.run({place: make_request(rig, PROMPTS[place], SOME)})
    same(rig, {place: place for place in places}, shelf.answer(case))


SCHEDULES = [
    Schedule("reversed, pages of 7", page_size=7, scheduling=PIPELINED, reverse=True),
    Schedule("chunks of 8, pages of 1", page_size=1, scheduling=CHUNKED),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@each_family
def test_no_schedule_changes_a_bit(case: Case, shelf: Shelf, schedule: Schedule) -> None:
    rig = schedule.run(shelf.checkpoint(case), FEW_PROMPTS, SOME)
    same(rig, dict(enumerate(FEW)), shelf.answer(case))


@each_family
def test_each_prompt_twice_at_once(case: Case, shelf: Shelf) -> None:
    rig = Schedule("doubled", scheduling=BOTH).run(shelf.checkpoint(case), FEW_PROMPTS * 2, SOME)
    same(rig, dict(enumerate(FEW * 2)), shelf.answer(case))


def tight(directory: Path, page_size: int) -> int:
    """Tokens of a pool in which the longest has room and little else."""
    layout = read_config(directory).kv_layout(page_size, "float32")
    pages = layout.pages_for(LONGEST, NARROW.ahead) + 1
    return -(-pages // len(layout.groups)) * page_size


@each_case
def test_preemptions_change_no_bit(case: Case, shelf: Shelf) -> None:
    directory = shelf.checkpoint(case)
    schedule = Schedule("preempted", 7, tight(directory, 7), NARROW, preempts=1)
    rig = schedule.run(directory, FEW_PROMPTS, SOME)
    same(rig, dict(enumerate(FEW)), shelf.answer(case))


@each_family
def test_a_shared_beginning_is_not_computed_again(case: Case, shelf: Shelf) -> None:
    """Prompts that start alike: one, and when it is done some more at once."""
    rig = make_rig(shelf.checkpoint(case), 4, 2048, NARROW, record_logits=True)
    first, *others = ALIKE[::2]
    rig.run({first: make_request(rig, PROMPTS[first], SOME)})
    rig.run({place: make_request(rig, PROMPTS[place], SOME) for place in others})
    assert all(rig.started[place] > 0 for place in others)
    same(rig, {place: place for place in (first, *others)}, shelf.answer(case))


@each_family
def test_half_precision_has_the_same_bits_under_any_schedule(case: Case, shelf: Shelf) -> None:
    prompts, directory = FEW_PROMPTS[::2] + FEW_PROMPTS[-1:], shelf.checkpoint(case)
    one = Schedule("together").run(directory, prompts, 8, "bfloat16")
    other = Schedule("apart", 7, scheduling=NARROW, reverse=True).run(directory, prompts, 8, "bfloat16")
    assert tokens_of(one, len(prompts)) == tokens_of(other, len(prompts))
    assert bits_of(one, len(prompts)) == bits_of(other, len(prompts))


# The comparisons above notice faults.


@each_case
def test_outputs_do_not_collapse(case: Case, shelf: Shelf) -> None:
    varied = [len(set(ids)) >= 8 for ids in shelf.reference(case).ids]
    assert sum(varied) >= 0.75 * len(varied)


@each_case
def test_no_choice_is_close(case: Case, shelf: Shelf) -> None:
    assert shelf.reference(case).margins.min() > 1e-3


@each_case
def test_the_pool_knows_the_windows(case: Case, shelf: Shelf) -> None:
    config = make_rig(shelf.checkpoint(case)).loaded.config
    assert config.windows == (case.windows or (None,) * config.layers)
    assert config.context == case.context
    assert all(len(prompt) + NEW <= case.context for prompt in PROMPTS)
