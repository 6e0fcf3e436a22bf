"""Law: every family gives the ids and log-probabilities that transformers gives, and no schedule changes a bit."""

import re
from pathlib import Path

import pytest

from model.config import read_config
from model.cpu.decoder import CompiledDecoder
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import CASES, Case
from tests.model.families.conftest import Shelf
from tests.model.families.parity import Answer, ask, compare
from tests.model.families.prompts import ALIKE, FEW, PROMPTS
from tests.model.families.reference import NEW
from tests.model.test_parity import BOTH, CHUNKED, PIPELINED, Schedule, bits_of, tokens_of
from tests.support.engines import Rig, make_request, make_rig
from tests.support.marks import few

pytestmark = pytest.mark.sample(3)

KINDS = {
    "llama", "gpt2", "gemma2", "phi", "opt-post-norm", "olmo2", "qwen3-moe", "qwen3.5", "gpt-oss", "deepseek-v3",
    "granite-hybrid", "lfm2", "nemotron-h", "falcon-h1",
}  # fmt: skip
"""Cases of which each has a shape of layers, of attention, of states or of experts that no other has."""
each_kind = few("case", CASES, KINDS)
"""The other cases are slow: they are put together from the same parts."""
PARTS = {
    "bloom", "cohere2", "exaone4", "gemma3", "gemma4", "glm4-moe-lite", "gptj", "kimi-linear", "llama4", "llama-llama3",
    "mamba2", "minimax-m2", "phi3-longrope", "qwen2-moe", "smollm3", "stablelm",
}  # fmt: skip
"""Cases with a part that no kind has."""
each_part = few("case", CASES, KINDS | PARTS)
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


@each_part
@pytest.mark.sample(2)
def test_tokens_and_logprobs_are_those_of_transformers(case: Case, shelf: Shelf) -> None:
    compare(shelf.answer(case), shelf.reference(case))


WHY_NOT = "a head has 2[04] elements|a recurrent layer has 120 channels|the plain part of its attention has 24"


@each_part
def test_kernels_compute_all_of_it(case: Case, shelf: Shelf) -> None:
    """Only widths keep a model from the CPU's kernels, none of its parts does."""
    try:
        rig = make_rig(shelf.checkpoint(case), backend="cpu")
    except ValueError as error:
        assert re.search(WHY_NOT, str(error))  # noqa: PT017
    else:
        assert type(rig.loaded.runner.model) is CompiledDecoder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_by_layer_it_is_the_same(case: Case, shelf: Shelf) -> None:
    compare(ask(shelf.checkpoint(case), FEW, backend="reference"), shelf.reference(case))


@each_kind
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
@each_kind
def test_no_schedule_changes_a_bit(case: Case, shelf: Shelf, schedule: Schedule) -> None:
    rig = schedule.run(shelf.checkpoint(case), FEW_PROMPTS, SOME)
    same(rig, dict(enumerate(FEW)), shelf.answer(case))


@each_kind
def test_each_prompt_twice_at_once(case: Case, shelf: Shelf) -> None:
    rig = Schedule("doubled", scheduling=BOTH).run(shelf.checkpoint(case), FEW_PROMPTS * 2, SOME)
    same(rig, dict(enumerate(FEW * 2)), shelf.answer(case))


def tight(directory: Path, page_size: int) -> int:
    """Tokens of a pool in which the longest has room and little else."""
    layout = read_config(directory).kv_layout(page_size, "float32")
    pages = layout.pages_for(LONGEST, NARROW.ahead) + 1
    if layout.recurrent:  # with pages for a state more, another sequence begins
        return layout.tokens_in(pages + 2 * layout.states.pages)
    return -(-pages // len(layout.groups)) * page_size


@each_kind
def test_preemptions_change_no_bit(case: Case, shelf: Shelf) -> None:
    directory = shelf.checkpoint(case)
    size = 1 if read_config(directory).recurrent else 7  # a state takes many pages: larger ones are never short
    schedule = Schedule("preempted", size, tight(directory, size), NARROW, preempts=1)
    rig = schedule.run(directory, FEW_PROMPTS, SOME)
    same(rig, dict(enumerate(FEW)), shelf.answer(case))


@each_kind
def test_a_shared_beginning_is_not_computed_again(case: Case, shelf: Shelf) -> None:
    """Prompts that start alike: one, and when it is done some more at once."""
    rig = make_rig(shelf.checkpoint(case), 4, 2048, NARROW, record_logits=True)
    first, *others = ALIKE[::2]
    rig.run({first: make_request(rig, PROMPTS[first], SOME)})
    rig.run({place: make_request(rig, PROMPTS[place], SOME) for place in others})
    assert all(rig.started[place] > 0 for place in others)
    same(rig, {place: place for place in (first, *others)}, shelf.answer(case))


@each_kind
def test_half_precision_has_the_same_bits_under_any_schedule(case: Case, shelf: Shelf) -> None:
    prompts, directory = FEW_PROMPTS[::2] + FEW_PROMPTS[-1:], shelf.checkpoint(case)
    one = Schedule("together").run(directory, prompts, 8, "bfloat16")
    other = Schedule("apart", 7, scheduling=NARROW, reverse=True).run(directory, prompts, 8, "bfloat16")
    assert tokens_of(one, len(prompts)) == tokens_of(other, len(prompts))
    assert bits_of(one, len(prompts)) == bits_of(other, len(prompts))


# The comparisons above notice faults.


@each_part
@pytest.mark.sample(2)
def test_outputs_do_not_collapse(case: Case, shelf: Shelf) -> None:
    varied = [len(set(ids)) >= 8 for ids in shelf.reference(case).ids]
    assert sum(varied) >= 0.75 * len(varied)


@each_part
@pytest.mark.sample(2)
def test_no_choice_is_close(case: Case, shelf: Shelf) -> None:
    assert shelf.reference(case).margins.min() > 1e-3


@each_part
def test_the_pool_knows_the_windows(case: Case, shelf: Shelf) -> None:
    config = make_rig(shelf.checkpoint(case)).loaded.config
    assert config.windows == (case.windows or (None,) * config.layers)
    assert config.context == case.context
    assert all(len(prompt) + NEW <= case.context for prompt in PROMPTS)
