"""Several sequences of a prompt, and beam searches, where layers see a window and pages behind it are let go."""

from pathlib import Path
from typing import Any

import pytest

from scheduler.parameters import Beam
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import random_prompts
from tests.model.test_windows import CHUNKS, MODELS
from tests.support.engines import Rig, key_of, make_request, make_rig

NEW, COUNT = 30, 3
PROMPTS = random_prompts([3, 17, 40, 70], seed=8)


@pytest.fixture(scope="module", params=MODELS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("windowed"))


def run(directory: Path, **kind: Any) -> Rig:
    """Runs for each prompt sequences that are drawn, and a search."""
    rig = make_rig(directory, **({"page_size": 4, "settings": SchedulerSettings(max_sequences=64)} | kind))
    requests = {}
    for i, prompt in enumerate(PROMPTS):
        requests[i] = make_request(rig, prompt, NEW, temperature=1.0, seed=4, sequence_count=COUNT)
        requests[10 + i] = make_request(rig, prompt, NEW, sequence_count=COUNT, beam=Beam(4, 0.5))
    rig.run(requests, limit=5000)
    return rig


@pytest.fixture(scope="module")
def plain(windowed: Path) -> Rig:
    """Everything is computed anew in each step, on pages that are never let go: what no sharing can get wrong."""
    settings = SchedulerSettings(max_sequences=64, recompute=True)
    return run(windowed, settings=settings, pool_tokens=16384)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"page_size": 1},
        {"page_size": 7, "prefix_cache": False},
        {"settings": CHUNKS},
        {"settings": SchedulerSettings(max_sequences=16, prefill_chunk=9, steps_in_flight=2), "pool_tokens": 150},
    ],
    ids=["together", "page of 1", "page of 7, no prefix cache", "chunked, few rows", "small pool"],
)
@pytest.mark.sample(2)
def test_nothing_that_is_shared_changes_a_token(windowed: Path, plain: Rig, kind: dict[str, Any]) -> None:
    rig = run(windowed, **kind)
    found = {key: result.tokens for key, result in rig.results.items()}
    assert found == {key: result.tokens for key, result in plain.results.items()}
    assert {len(found[key_of(i, index)]) for i in range(len(PROMPTS)) for index in range(COUNT)} == {NEW}
