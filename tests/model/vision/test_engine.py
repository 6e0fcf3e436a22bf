"""Law: prompts with images, in any batch and under any schedule, give the tokens that transformers gives."""

from dataclasses import replace
from typing import Any

import pytest

from rpc.engines.assembly import check_indivisible
from scheduler.events import EndReason, Submit
from scheduler.parameters import Beam, Output, Sampling
from scheduler.settings import SchedulerSettings
from tests.model.vision.cases import BY_NAME, CAUSAL, Case
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded, picture
from tests.model.vision.seen import BOTH_WAYS, NEW, SIZES, TEXTS, Seen
from tests.support.engines import Rig, key_of, make_rig
from tests.support.marks import few

pytestmark = pytest.mark.sample(3)

CONTEXT = 1024
RECURRENT = [case for case in CAUSAL if case.name.startswith("qwen3.5")]
"""They are preempted in `tests/model/families`: a state takes more pages than what this pool lacks."""
STEPS = SchedulerSettings(max_batched_tokens=CONTEXT + 32, max_sequences=32)

each = pytest.mark.parametrize("case", [*CAUSAL, *BOTH_WAYS], ids=str)


@pytest.fixture(scope="module")
def seen(shelf: Shelf):  # type: ignore[no-untyped-def]
    made: dict[str, Seen] = {}

    def get(case: Case) -> Seen:
        if case.name not in made:
            made[case.name] = Seen(case, shelf)
        return made[case.name]

    return get


def run(one: Seen, **kind: Any) -> Rig:
    rig = make_rig(one.directory, record_logits=True, **({"settings": STEPS, "pool_tokens": 2048} | kind))
    rig.run({i: one.request(rig.loaded.limits, i) for i in range(len(one.expected))})
    assert [rig.results[i].tokens for i in range(len(one.expected))] == one.expected
    return rig


SCHEDULES: dict[str, dict[str, Any]] = {
    "page of 1": {"page_size": 1},
    "page of 7": {"page_size": 7},
    "few rows": {"settings": replace(STEPS, max_sequences=2)},
    "pipelined": {"settings": replace(STEPS, steps_in_flight=2)},
    "no prefix cache": {"prefix_cache": False},
    "recompute": {"settings": replace(STEPS, recompute=True)},
}


@each
@pytest.mark.sample(3)
def test_tokens_are_those_of_transformers_in_one_mixed_batch(case: Case, seen: Any) -> None:
    rig = run(seen(case))
    assert rig.scheduler.stats().images_encoded == len(SIZES), "one call for each content"


@each
@few("name", SCHEDULES, ["page of 7", "pipelined"])
@pytest.mark.sample(3)
def test_any_schedule_gives_the_same_bits(case: Case, name: str, seen: Any) -> None:
    one = seen(case)
    together, other = run(one), run(one, **SCHEDULES[name])
    assert all(other.logits_of(i) == together.logits_of(i) for i in range(len(one.expected)))


@pytest.mark.parametrize("case", CAUSAL, ids=str)
@pytest.mark.sample(4)
def test_chunks_may_end_in_an_image(case: Case, seen: Any) -> None:
    run(seen(case), settings=replace(STEPS, prefill_chunk=8))


@pytest.mark.parametrize("case", [case for case in (*CAUSAL, *BOTH_WAYS) if case not in RECURRENT], ids=str)
def test_preempted_sequences_go_on_as_they_would_have(case: Case, seen: Any) -> None:
    one = seen(case)
    first = make_rig(one.directory, page_size=1).loaded
    length, layout = len(one.request(first.limits, 2).prompt), first.layout
    room = -(-3 * layout.pages_for(length + 4, ahead=1) // len(layout.groups))  # windows need less
    settings = replace(STEPS, prefill_chunk=8) if layout.windows else STEPS  # a chunk's pages are more than a window's
    rig = make_rig(one.directory, page_size=1, pool_tokens=room, settings=settings, prefix_cache=False)
    results = rig.run({i: one.request(rig.loaded.limits, 2) for i in range(3)})
    assert [results[i].tokens for i in range(3)] == [one.expected[2]] * 3
    assert rig.preemptions
    assert rig.scheduler.stats().images_encoded == 1


@each
def test_an_image_that_was_seen_before_is_neither_encoded_nor_computed_again(case: Case, seen: Any) -> None:
    one = seen(case)
    rig = make_rig(one.directory, page_size=4, settings=STEPS)
    for attempt in range(3):
        results = rig.run({attempt: one.request(rig.loaded.limits, 1)})
        assert results[attempt].tokens == one.expected[1]
        prompt = len(one.request(rig.loaded.limits, 1).prompt)
        step = rig.loaded.layout.interval or 4  # a recurrent state goes on from a checkpoint
        assert rig.started[attempt] == (0 if not attempt else (prompt - 1) // step * step)
    stats = rig.scheduler.stats()
    assert stats.images_encoded == 2


@each
def test_another_image_is_another_prompt(case: Case, seen: Any) -> None:
    """Same text, same size, other pixels: nothing from the first image on may be shared."""
    one = seen(case)
    rig = make_rig(one.directory, page_size=1, settings=STEPS)
    spec = one.spec(2)
    rig.run({1: one.preparer.prepare(spec, rig.loaded.limits)})
    other = one.preparer.prepare(replace(spec, images=(encoded(picture(32, 32, 9)),)), rig.loaded.limits)
    rig.run({2: other})
    first = int(other.images[0].places[0])
    step = rig.loaded.layout.interval or 1
    assert rig.started[2] == (0 if case in BOTH_WAYS else first // step * step)
    assert rig.scheduler.stats().images_encoded == 2


@pytest.mark.parametrize("case", BOTH_WAYS, ids=str)
def test_prompts_in_both_directions_share_only_as_a_whole(case: Case, seen: Any) -> None:
    one = seen(case)
    rig = make_rig(one.directory, page_size=1, settings=STEPS)
    rig.run({1: one.request(rig.loaded.limits, 3)})
    longer = replace(one.spec(3), prompt=TEXTS[0] + " sat")
    rig.run({2: one.preparer.prepare(longer, rig.loaded.limits)})
    assert rig.started[2] == 0


@pytest.mark.parametrize("case", [BY_NAME["llava-clip"], BY_NAME["paligemma"]], ids=str)
def test_several_sequences_and_searches_go_on_from_an_image(case: Case, seen: Any) -> None:
    one = seen(case)
    rig = make_rig(one.directory, page_size=4, settings=STEPS)
    requests = {
        1: one.request(rig.loaded.limits, 0, sampling=Sampling(temperature=1.0, seed=1, sequence_count=3)),
        2: one.request(rig.loaded.limits, 0, sampling=Sampling(beam=Beam(3), sequence_count=2)),
        3: one.request(rig.loaded.limits, 0),
    }
    results = rig.run(requests)
    assert results[3].tokens == one.expected[0]
    assert len({tuple(results[key_of(1, index)].tokens) for index in range(3)}) == 3
    assert sum(results[2].logprobs) >= sum(results[3].logprobs) - 1e-4
    assert rig.scheduler.stats().images_encoded == 1


def test_a_generated_placeholder_is_an_ordinary_token(seen: Any) -> None:
    one = seen(BY_NAME["llava-clip"])
    rig = make_rig(one.directory, settings=STEPS)
    placeholder = one.preparer.images.token_id
    always = Sampling(temperature=0.0, logit_bias=((placeholder, 100.0),))
    results = rig.run({1: one.request(rig.loaded.limits, 0, sampling=always)})
    assert results[1].tokens == [placeholder] * NEW
    assert results[1].end is not None
    assert results[1].end.reason is EndReason.LENGTH
    assert rig.scheduler.stats().images_encoded == 1


def test_prompt_logprobs_go_past_images(seen: Any) -> None:
    one = seen(BY_NAME["llava-clip"])
    rig = make_rig(one.directory, settings=STEPS)
    request = one.request(rig.loaded.limits, 0, output=Output(prompt_logprobs=True))
    outputs = rig.turn([Submit(1, request)])
    assert outputs is not None
    assert sum(len(part.logprobs.chosen) for part in outputs.prompt_parts) == len(request.prompt) - 1
    rig.play({})


def test_a_step_that_could_not_hold_the_longest_prompt_is_a_start_up_error(seen: Any) -> None:
    rig = run(seen(BOTH_WAYS[0]))
    config = rig.loaded.config
    check_indivisible(config, STEPS)
    for settings, message in (
        (replace(STEPS, max_batched_tokens=CONTEXT + 31), "--max-batched-tokens 1056"),
        (replace(STEPS, prefill_chunk=512), "--prefill-chunk is 512"),
    ):
        with pytest.raises(ValueError, match=message):
            check_indivisible(config, settings)
    check_indivisible(run(seen(CAUSAL[0])).loaded.config, SchedulerSettings(prefill_chunk=8))
