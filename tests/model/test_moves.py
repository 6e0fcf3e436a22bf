"""Law: a sequence that goes on in another engine, on pages that were copied from the first, gets the same bits."""

from pathlib import Path

import numpy as np
import pytest

from cache_manager.block_hash import BlockHash
from scheduler.events import Abort, Submit
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import random_prompts
from tests.support.checkpoints import write_ministral
from tests.support.engines import Rig, make_request, make_rig

NEW, BEFORE = 24, 9  # tokens of output, and those of them from the first engine
SAMPLING = [{}, {"temperature": 1.0, "seed": 21}, {"temperature": 0.8, "top_p": 0.9, "seed": 22}]
PIPELINED = SchedulerSettings(max_sequences=4, max_batched_tokens=48, prefill_chunk=16, steps_in_flight=2)


def pages_of(rig: Rig) -> dict[BlockHash, np.ndarray]:
    """All that it has, as another engine gets them."""
    index, groups = rig.scheduler.cache.prefix.index, len(rig.scheduler.cache.layout.groups)
    nodes = [node for node in index.all() if index.run(index.hashes([node]))]
    content = rig.loaded.runner.export(index.pages[:, nodes].T.reshape(-1))
    return dict(zip(index.hashes(nodes), content.reshape(len(nodes), groups, -1), strict=True))


@pytest.mark.parametrize("scheduling", [None, PIPELINED], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize(
    ("kind", "kv_dtype", "page_size"),
    [("llama", "auto", 4), ("llama", "auto", 16), ("llama", "int8", 4), ("windows", "auto", 4)],
)
def test_moved_pages_change_no_bit(
    tiny: Path, tmp_path: Path, kind: str, kv_dtype: str, page_size: int, scheduling: SchedulerSettings | None
) -> None:
    directory = tiny if kind == "llama" else write_ministral(tmp_path, 20, "sfsf")
    prompts = random_prompts([70, 33, 90], seed=51)

    def rig() -> Rig:
        return make_rig(directory, page_size, 1024, scheduling, record_logits=True, kv_dtype=kv_dtype)

    alone, first, second = rig(), rig(), rig()
    requests = [make_request(alone, p, NEW, **how) for p, how in zip(prompts, SAMPLING, strict=True)]
    expected = [alone.run({i: request})[i].tokens for i, request in enumerate(requests)]
    events = [Submit(i, request) for i, request in enumerate(requests)]
    while any(len(first.results[i].tokens) < BEFORE if i in first.results else True for i in range(3)):
        first.turn(events)
        events = []
    emitted = [tuple(first.results[i].tokens) for i in range(3)]
    first.turn([Abort(i) for i in range(3)])
    pages = pages_of(first)
    moved = [Submit(i, request, (emitted[i],), again=True, transferred=pages) for i, request in enumerate(requests)]
    second.play({0: moved})
    for i, request in enumerate(requests):
        assert second.results[i].tokens == expected[i]
        for position, bits in second.logits_of(i).items():
            assert bits == alone.logits_of(i)[position]
        known = len(request.prompt) + len(emitted[i])
        assert second.started[i] == min(len(request.prompt), (known - 1) // page_size * page_size)
    left = sum((len(r.prompt) + len(e) - 1) % page_size + 1 for r, e in zip(requests, emitted, strict=True))
    drawn = sum(NEW - len(e) - 1 for e in emitted)
    assert second.scheduler.stats().computed_tokens == left + drawn, "nothing of what came is computed"
    assert second.scheduler.stats().pages_transferred > 3 * 33 // page_size
