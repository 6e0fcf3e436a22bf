"""Models whose layers see a window: tokens are those of transformers, and no schedule, preemption or prefix hit changes
a bit, while pages behind the window are poisoned and given to others.
"""

import json
from pathlib import Path

import pytest

from cache_manager.manager import CacheManager
from model.config import read_config
from model.errors import CheckpointError
from scheduler.events import EndReason
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import random_prompts
from tests.support.checkpoints import greedy_ids, write_ministral, write_mistral
from tests.support.engines import Rig, make_request, make_rig

NEW = 24
CHUNKS = SchedulerSettings(max_sequences=6, max_batched_tokens=40, prefill_chunk=16, steps_in_flight=2)
SMALL = SchedulerSettings(max_sequences=6, max_batched_tokens=12, prefill_chunk=5)
MODELS = {
    "all layers": lambda path: write_mistral(path, 24),
    "a window of one page and a token": lambda path: write_mistral(path, 17, num_hidden_layers=1),
    "alternating": lambda path: write_ministral(path, 20, "sfsf"),
    "two in three": lambda path: write_ministral(path, 33, "ssfssf"),
    "one full layer at the end": lambda path: write_ministral(path, 7, "sssf"),
}


@pytest.fixture(scope="module", params=MODELS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some start alike, at lengths on both sides of windows and pages."""
    head, other = random_prompts([70, 100], seed=5)
    tails = random_prompts([1, 30, 90, 7], seed=6)
    return [head + tail for tail in tails] + [other, other[:40] + tails[1], head[:33], head[:5], other[:16]]


@pytest.fixture(scope="module")
def expected(windowed: Path, prompts: list[list[int]]) -> tuple[list[list[int]], Rig]:
    """Ids of transformers, and a rig that ran each prompt alone."""
    rig = make_rig(windowed, record_logits=True, prefix_cache=False)
    for i, prompt in enumerate(prompts):
        rig.run({i: make_request(rig, prompt, NEW)})
    return greedy_ids(windowed, prompts, NEW), rig


def test_tokens_are_those_of_transformers(expected: tuple[list[list[int]], Rig]) -> None:
    ids, rig = expected
    assert [rig.results[i].tokens for i in range(len(ids))] == ids


@pytest.mark.parametrize(
    ("page_size", "scheduling", "prefix_cache"),
    [(4, CHUNKS, True), (16, CHUNKS, True), (16, SMALL, True), (1, SMALL, True), (4, SMALL, False)],
)
@pytest.mark.sample(3)
def test_no_schedule_changes_a_bit(
    windowed: Path,
    prompts: list[list[int]],
    expected: tuple[list[list[int]], Rig],
    page_size: int,
    scheduling: SchedulerSettings,
    prefix_cache: bool,
) -> None:
    """The pool holds one of the longest and little else, so there are preemptions and evictions."""
    rig = make_rig(windowed, page_size, 224, scheduling, record_logits=True, prefix_cache=prefix_cache)
    for again in range(2):
        rig.run({100 * again + i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    for again in range(2):
        for i in range(len(prompts)):
            assert rig.results[100 * again + i].tokens == expected[0][i]
            assert rig.logits_of(100 * again + i) == expected[1].logits_of(i)
    assert prefix_cache == any(rig.started.values())


def test_a_prompt_longer_than_the_pool(tmp_path: Path) -> None:
    """A model with windows alone needs no more pages for more tokens."""
    directory = write_mistral(tmp_path, 24)
    (prompt,) = random_prompts([200], seed=8)
    rig = make_rig(directory, 4, 80, SMALL)
    assert rig.loaded.pages * 4 < len(prompt)
    assert rig.run({0: make_request(rig, prompt, NEW)})[0].tokens == greedy_ids(directory, [prompt], NEW)[0]
    assert not rig.preemptions


def test_windows_make_room_for_more_sequences(tmp_path: Path) -> None:
    """Six requests that a model without windows could run two at a time."""
    directory = write_ministral(tmp_path, 16, "sssf")
    prompts = random_prompts([200] * 6, seed=9)
    rig = make_rig(directory, 4, 2 * 224, SchedulerSettings(max_sequences=6, max_batched_tokens=24))
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)}, limit=6 * (200 // 18 + NEW))
    assert not rig.preemptions


@pytest.mark.parametrize("late", [1, 4])
def test_a_page_that_is_let_go_too_early_is_noticed(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    directory = write_ministral(tmp_path, 20, "sf")
    slide = CacheManager.slide
    monkeypatch.setattr(CacheManager, "slide", lambda self, rows, computed: slide(self, rows, computed + late))
    rig = make_rig(directory, 1, 224, SMALL, prefix_cache=False)
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    ends = [rig.results[i].end for i in range(len(prompts))]
    assert any(end is not None and end.reason is EndReason.FAULT for end in ends)


def test_groups_have_equally_many_layers(tmp_path: Path) -> None:
    config = read_config(write_ministral(tmp_path, 33, "ssfssf"))
    layout = config.kv_layout(16, "float32")
    assert [group.layers for group in layout.groups] == [(2, 5), (0, 1), (3, 4)]
    assert layout.windows == (None, 33, 33)


def test_a_window_that_no_sequence_leaves_is_none(tmp_path: Path) -> None:
    config = read_config(write_mistral(tmp_path, 256))
    assert config.context == 256
    assert config.kv_layout(16, "float32").windows == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "'sliding_window' is 0, must be at least 1"),
        ({"layer_types": ["sliding_attention"]}, "must name 'sliding_attention' or 'full_attention' for each of 2"),
        ({"layer_types": ["sliding_attention", ["full_attention"]]}, "'layer_types' is"),
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "'layer_types' is"),
    ],
)
def test_what_is_wrong_with_windows_is_said(tmp_path: Path, change: dict[str, object], message: str) -> None:

    path = write_ministral(tmp_path, 20, "sf") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)
