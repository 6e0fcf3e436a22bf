"""The same API without a KV cache: the same tokens and logits, bit for bit, for the work that the cache saves."""

from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.settings import SchedulerSettings
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.checkpoints import greedy_ids, write_llama, write_ministral
from tests.support.engines import Rig, make_request, make_rig

pytestmark = pytest.mark.sample(3)

LENGTHS = [1, 5, 16, 17, 40]
NEW = 20
MODELS = {
    "full attention": lambda directory: write_llama(directory),
    "windows in some layers": lambda directory: write_ministral(directory, 9, "fss"),
}


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


def rig_of(directory: Path, recompute: bool, pool_tokens: int = 4096, **settings: int) -> Rig:
    scheduling = SchedulerSettings(**({"max_sequences": 64} | settings), recompute=recompute)
    return make_rig(directory, 7, pool_tokens, scheduling, record_logits=True, queue=ENDLESS)


def run(directory: Path, recompute: bool, pool_tokens: int = 4096, **settings: int) -> Rig:
    rig = rig_of(directory, recompute, pool_tokens, **settings)
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(random_prompts(LENGTHS))})
    return rig


@pytest.fixture(scope="module")
def cached(directory: Path) -> Rig:
    return run(directory, recompute=False)


def same(rig: Rig, cached: Rig) -> bool:
    return rig.logits.keys() == cached.logits.keys() and all(
        logits.tobytes() == cached.logits[key].tobytes() for key, logits in rig.logits.items()
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_chunk": 8}, {"steps_in_flight": 2}, {"pool_tokens": 100, "max_sequences": 4, "steps_in_flight": 2}],
    ids=["plain", "chunks", "two steps in flight", "preempted"],
)
def test_tokens_and_logits_are_those_of_the_cache(directory: Path, cached: Rig, settings: dict[str, int]) -> None:
    rig = run(directory, True, **settings)
    assert [rig.results[i].tokens for i in range(len(LENGTHS))] == greedy_ids(directory, random_prompts(LENGTHS), NEW)
    assert same(rig, cached)
    assert (rig.preemptions > 0) == ("pool_tokens" in settings)


@pytest.mark.parametrize("length", LENGTHS)
def test_counter_of_computed_tokens_says_which_it_was(directory: Path, length: int) -> None:
    for recompute in (False, True):
        rig = rig_of(directory, recompute)
        rig.run({0: make_request(rig, random_prompts([length])[0], NEW)})
        steps = range(length, length + NEW)
        assert rig.scheduler.stats().computed_tokens == (sum(steps) if recompute else steps[-1])


def test_nothing_is_read_that_an_earlier_step_has_left(directory: Path, cached: Rig) -> None:
    """The whole pool is filled with NaN before each step; with the cache that would be the end of every request."""

    def poisoned(recompute: bool) -> Rig:
        rig = rig_of(directory, recompute)
        runner, everything = rig.loaded.runner, np.arange(rig.loaded.pages, dtype=np.int32)
        launch = runner.launch

        def spoil_and_launch(plan):  # type: ignore[no-untyped-def]
            with torch.inference_mode():
                runner.attention.poison(everything)
            launch(plan)

        runner.launch = spoil_and_launch  # type: ignore[method-assign]
        rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(random_prompts(LENGTHS))})
        return rig

    assert same(poisoned(True), cached)
    assert not same(poisoned(False), cached)


def test_nothing_is_found_that_another_request_has_left(directory: Path) -> None:
    rig = rig_of(directory, recompute=True)
    prompt = random_prompts([40])[0]
    for attempt in (0, 1):
        rig.run({attempt: make_request(rig, prompt, NEW)})
    assert rig.started == {0: 0, 1: 0}
    assert rig.results[0].tokens == rig.results[1].tokens
