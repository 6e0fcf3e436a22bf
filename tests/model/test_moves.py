"""Law: a sequence that goes on in another engine, on pages that were copied from the first, gets the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest

from cache_manager.block_hash import BlockHash, BlockHasher
from cache_manager.transfers import TransferredPage
from scheduler.events import Abort, Submit
from scheduler.settings import SchedulerSettings
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME
from tests.model.test_parity import random_prompts
from tests.support.checkpoints import write_ministral
from tests.support.engines import Rig, make_request, make_rig
from tests.support.transfers import transferred

NEW, BEFORE = 24, 9  # tokens of output, and those of them from the first engine
SAMPLING = [{}, {"temperature": 1.0, "seed": 21}, {"temperature": 0.8, "top_p": 0.9, "seed": 22}]
PIPELINED = SchedulerSettings(max_sequences=4, max_batched_tokens=48, prefill_chunk=16, steps_in_flight=2)


def pages_of(rig: Rig, submit: Submit) -> dict[BlockHash, TransferredPage]:
    """Returns what another engine gets of a request's pages."""
    hasher = BlockHasher(bytes(32), rig.loaded.numerics, rig.loaded.layout.page_size)
    return transferred(rig.scheduler, hasher, rig.loaded.runner.export, submit)


def write(kind: str, directory: Path) -> Path:
    return write_ministral(directory, 20, "sfsf") if kind == "windows" else checkpoints.write(BY_NAME[kind], directory)


@pytest.mark.parametrize("scheduling", [None, PIPELINED], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize(
    ("kind", "kv_dtype", "page_size"),
    [
        ("llama", "auto", 4),
        ("llama", "auto", 16),
        ("llama", "int8", 4),
        ("windows", "auto", 4),
        ("gpt-oss", "auto", 4),
        ("qwen3.5", "auto", 4),
        ("qwen3.5", "int8", 4),
        ("falcon-h1", "auto", 4),
        ("lfm2", "auto", 4),
        ("mamba2", "auto", 4),
        ("kimi-linear", "auto", 4),
    ],
)
@pytest.mark.sample(3)
def test_moved_pages_change_no_bit(
    tiny: Path, tmp_path: Path, kind: str, kv_dtype: str, page_size: int, scheduling: SchedulerSettings | None
) -> None:
    directory = tiny if kind == "llama" else write(kind, tmp_path)
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
    asked = [Submit(i, request, (emitted[i],), again=True) for i, request in enumerate(requests)]
    second.play({0: [replace(submit, transferred=pages_of(first, submit)) for submit in asked]})
    step = first.loaded.layout.interval or page_size  # a recurrent state goes on from a checkpoint
    for i, request in enumerate(requests):
        assert second.results[i].tokens == expected[i]
        for position, bits in second.logits_of(i).items():
            assert bits == alone.logits_of(i)[position]
        known = len(request.prompt) + len(emitted[i])
        assert second.started[i] == min(len(request.prompt), (known - 1) // step * step)
    left = sum((len(r.prompt) + len(e) - 1) % step + 1 for r, e in zip(requests, emitted, strict=True))
    drawn = sum(NEW - len(e) - 1 for e in emitted)
    assert second.scheduler.stats().computed_tokens == left + drawn, "nothing of what came is computed"
    assert second.scheduler.stats().pages_transferred > 3 * 33 // step
