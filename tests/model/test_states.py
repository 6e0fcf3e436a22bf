"""Law: a recurrent state goes on exactly where its tokens end, and a step that runs twice spoils it for nobody.

That no schedule changes a bit is in `families/test_families.py`. Here are the faults that it must catch, and errors.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.attention.backend import NONE, StateSegments
from model.config import read_config
from model.input_batch import InputBatch
from model.parallel.shard import Shard
from model.reference.states import PagedStates
from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.settings import EngineConfig
from scheduler.settings import SchedulerSettings
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME
from tests.model.families.prompts import ALIKE, PROMPTS
from tests.support.engines import Rig, make_request, make_rig
from tests.support.planted import plant
from tests.support.swaps import always_swap

pytestmark = pytest.mark.sample(3)

NARROW = SchedulerSettings(max_sequences=4, max_batched_tokens=27, prefill_chunk=13)
NEW = 20
FIRST, *OTHERS = ALIKE


KINDS = ["qwen3.5", "granite-hybrid", "lfm2", "falcon-h1", "mamba2", "kimi-linear"]
"""Cases of tests/model/families, each with a state of another kind.

Falcon-H1 has attention in the same layers, Mamba-2 in none. Kimi Linear has latent attention beside its states.
"""


QUICK = ("qwen3.5", "falcon-h1")


@pytest.fixture(
    scope="module", params=[kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(BY_NAME[request.param], tmp_path_factory.mktemp("recurrent"))


def run(directory: Path, wrap: Callable[[Any], Any] | None = None, **kind: Any) -> Rig:
    """A prompt, and when it is done others that begin like it."""
    rig = make_rig(directory, 4, 4096, NARROW, **kind)
    if wrap is not None:
        rig.wrap_model(wrap)
    rig.run({FIRST: make_request(rig, PROMPTS[FIRST], NEW)})
    rig.run({place: make_request(rig, PROMPTS[place], NEW) for place in OTHERS})
    return rig


@pytest.fixture(scope="module")
def right(directory: Path) -> dict[int, list[int]]:
    rig = run(directory, prefix_cache=False)
    return {place: rig.results[place].tokens for place in ALIKE}


def tokens(rig: Rig) -> dict[int, list[int]]:
    return {place: rig.results[place].tokens for place in ALIKE}


def test_prompts_go_on_from_checkpoints(directory: Path, right: dict[int, list[int]]) -> None:
    rig = run(directory)
    assert tokens(rig) == right
    interval = rig.loaded.layout.interval
    assert all(rig.started[place] % interval == 0 for place in ALIKE)
    assert any(rig.started[place] > 0 for place in OTHERS)


def changed(change: Callable[[StateSegments], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def stand_in(right: Callable[..., StateSegments]) -> Callable[..., StateSegments]:
        def segments(*given: Any) -> StateSegments:
            made = right(*given)
            change(made)
            return made

        return segments

    return lambda patch: plant(patch, InputBatch, "_segments", stand_in)


def not_reset(segments: StateSegments) -> None:
    fresh = segments.sources[0] == NONE
    segments.sources[:, fresh] = segments.targets[:, fresh]


def always_reset(segments: StateSegments) -> None:
    segments.sources[:] = NONE


def of_another_row(segments: StateSegments) -> None:
    segments.sources[:] = np.roll(segments.sources, 1, 1)


def in_order_of_pages(segments: StateSegments) -> None:
    segments.sources[:] = segments.sources[::-1]


def before_the_chunk(right: Callable[..., None]) -> Callable[..., None]:
    """A window that is kept is that before the last tokens."""

    def write(self: PagedStates, layer: int, pages: Any, number: int, unit: torch.Tensor) -> None:
        right(self, layer, pages, number, unit.roll(1) if number == 0 else unit)

    return write


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a state that is not reset at a new sequence": changed(not_reset),
    "a state that is always reset": changed(always_reset),
    "the state of another row": changed(of_another_row),
    "pages of a state in another order": changed(in_order_of_pages),
    "a window of other tokens": lambda patch: plant(patch, PagedStates, "_write", before_the_chunk),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(
    name: str, directory: Path, right: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[name](monkeypatch)
    assert tokens(run(directory, backend="reference")) != right


class RaisingAfterwards:
    """A model that computes a step with several rows in full, and then raises, at some of its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls, self.raised = inner, 0, 0

    def forward(self, batch: Any) -> Any:
        made = self.inner.forward(batch)
        self.calls += 1
        if self.calls % 7 == 0 and len(batch.wanted) > 1:
            self.raised += 1
            raise RuntimeError("the device lost its way")
        return made


def test_a_step_that_runs_twice_spoils_no_state(directory: Path, right: dict[int, list[int]]) -> None:
    """Its rows go on from their last checkpoints, and nobody sees it."""
    made: list[RaisingAfterwards] = []

    def wrap(inner: Any) -> Any:
        made.append(RaisingAfterwards(inner))
        return made[-1]

    rig = run(directory, wrap)
    assert made[0].raised > 1
    assert rig.preemptions > 0
    assert tokens(rig) == right


def test_drafts_are_refused_for_a_state_that_cannot_lose_them(directory: Path) -> None:
    scheduling = SchedulerSettings(max_sequences=4, max_batched_tokens=64, draft_tokens=3)
    with pytest.raises(ValueError, match="--speculative-tokens does not go with a model that has recurrent layers"):
        assemble(EngineConfig(model=ModelSettings(model=str(directory)), scheduler=scheduling))


def test_each_rank_has_the_states_of_its_heads(directory: Path) -> None:
    """Both ranks go on from the same checkpoints, with the bits that they have without."""
    plain, rig = (
        run(directory, ranks=2, prefix_cache=cached, record_logits=True, dtype="float32") for cached in (False, True)
    )
    assert any(rig.started[place] > 0 for place in OTHERS)
    assert tokens(rig) == tokens(plain)
    assert all(rig.logits_of(place) == plain.logits_of(place) for place in ALIKE)


def test_what_ranks_cannot_share_is_named(tmp_path: Path) -> None:
    config = read_config(checkpoints.write(BY_NAME["qwen3.5-wide"], tmp_path))
    with pytest.raises(ValueError, match=r"and recurrent layers of DeltaShape\(key_heads=3, .*; 1 can be"):
        Shard(0, 2).check(config)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sample(4)
def test_states_come_back_from_the_host(directory: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pool, whose evicted checkpoints go to the host: the prompts go on from there, with the same bits."""
    always_swap(monkeypatch)
    same: dict[str, Any] = {"record_logits": True, "ranks": ranks, "dtype": "float32"}
    plain = make_rig(directory, 4, 4096, NARROW, prefix_cache=False, **same)
    tight = make_rig(directory, 4, 300, NARROW, host_pages=4000, **same)
    for number in range(3):
        for place in ALIKE:
            attempt = place + 100 * number
            for rig in (plain, tight):
                rig.run({attempt: make_request(rig, PROMPTS[place], NEW)})
            assert tight.results[attempt].tokens == plain.results[attempt].tokens
            assert tight.logits_of(attempt) == plain.logits_of(attempt)
    stats = tight.scheduler.stats()
    assert stats.evicted_capacity > 0
    assert tight.scheduler.cache.pool.tier is not None
    assert tight.scheduler.cache.pool.tier.swapped_in > 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kv_in_8_bits_stands_beside_states(directory: Path, kv_dtype: str) -> None:
    """States stay float32: a prompt that goes on from a checkpoint has the same bits."""
    rigs = [
        make_rig(directory, 4, 4096, NARROW, record_logits=True, kv_dtype=kv_dtype, prefix_cache=cache)
        for cache in (True, False)
    ]
    for rig in rigs:
        for place in ALIKE:
            rig.run({place: make_request(rig, PROMPTS[place], NEW)})
    assert any(rigs[0].started[place] > 0 for place in OTHERS)
    assert all(rigs[0].logits_of(place) == rigs[1].logits_of(place) for place in ALIKE)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@torch.inference_mode()
def test_pages_of_states_are_exported_as_they_are(directory: Path, backend: str) -> None:
    rig = run(directory, backend=backend)
    runner, layout = rig.loaded.runner, rig.loaded.layout
    pages = np.arange(20, dtype=np.int32)
    groups = np.full(20, layout.tables - 1, np.int32)
    content = runner.attention.export(pages, groups)
    runner.attention.import_pages(pages + 20, groups, content)
    assert torch.equal(runner.attention.export(pages + 20, groups), content)
    assert content.any()
