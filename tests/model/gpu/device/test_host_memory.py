"""Law: KV that was moved to the host and back, or to another engine, has the same bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_manager.block_hash import BlockHasher
from model.page_store import PageStore
from scheduler.events import Abort, Submit
from scheduler.settings import SchedulerSettings
from tests.model.gpu.device.engine import NEAR, NEW, NUMBERS, PROMPTS, Oracle, on_device, random_prompts, result_of, run
from tests.model.gpu.device.place import DEVICE, needs_cuda
from tests.support.engines import Rig, make_request
from tests.support.swaps import always_swap
from tests.support.transfers import transferred

NARROW = SchedulerSettings(max_sequences=4, max_batched_tokens=64, prefill_chunk=32, steps_in_flight=2)
PAGES = 30


@pytest.fixture(scope="module")
def oracle(dense: Path) -> Oracle:
    return Oracle.of(dense)


def store_of(rig: Rig) -> PageStore:
    store = rig.loaded.runner.page_moves.store
    assert isinstance(store, PageStore)
    return store


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_pages_come_back_bit_for_bit(dense: Path, kv_dtype: str) -> None:
    """Through the host's memory to other pages, which held other bytes."""
    rig = on_device(dense, NARROW, kv_dtype=kv_dtype, host_pages=PAGES)
    attention, layout, store = rig.loaded.runner.attention, rig.loaded.layout, store_of(rig)
    source = np.random.default_rng(7)
    content = torch.from_numpy(source.integers(0, 256, (PAGES, layout.page_bytes), np.uint8))
    pages, others, groups = np.arange(PAGES, dtype=np.int32), np.arange(PAGES, 2 * PAGES, dtype=np.int32), [0] * PAGES
    slots = source.permutation(PAGES).astype(np.int32)
    whole = np.array(groups, np.int32)
    with torch.inference_mode():
        attention.import_pages(pages, whole, content)
        store.save(np.column_stack((pages, slots, whole)))
        attention.poison(pages)
        attention.poison(others)
        lost = store.load(np.column_stack((slots, others, whole)))
        back = attention.export(others, whole).cpu()
    assert not len(lost), f"pages {lost.tolist()} were lost"
    assert torch.equal(back, content), f"{int((back != content).any(1).sum())} of {PAGES} pages have other bits"
    rig.loaded.runner.close()


@needs_cuda
def test_the_hosts_memory_is_page_locked_until_its_engine_ends(dense: Path) -> None:
    rig = on_device(dense, NARROW, host_pages=PAGES)
    content = store_of(rig).content
    assert content.is_pinned(), "CUDA does not know the host's memory as page-locked"
    rig.loaded.runner.close()
    assert not content.is_pinned(), "it stays page-locked"
    assert torch.ones(1, device=DEVICE).item() == 1.0, "no error is left for a later launch"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_preempted_sequences_go_on_with_pages_from_the_host(
    dense: Path, kv_dtype: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_swap(monkeypatch)
    rig = on_device(dense, NARROW, page_size=4, pool_tokens=260, host_pages=400, kv_dtype=kv_dtype)
    prompts = [*PROMPTS, *random_prompts([90, 80, 70], seed=75)]
    for _ in range(3):
        oracle.check(prompts, run(rig, prompts), NEAR if kv_dtype == "auto" else 2 * NEAR)
    stats = rig.scheduler.stats()
    assert stats.swapped_out > 50, "hardly a page went to the host"
    assert stats.swapped_in > 50, "hardly a page came back"
    assert not stats.swap_lost, "a page did not hold what was put there"
    rig.loaded.runner.close()


def test_a_sequence_goes_on_in_another_engine(dense: Path, oracle: Oracle) -> None:
    """On pages that were copied from the first, whose tokens are not computed again."""
    first, second = (on_device(dense, NARROW, page_size=4) for _ in range(2))
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 30]
    asked = {number: make_request(first, prompt, NEW) for number, prompt in zip(NUMBERS, prompts, strict=False)}
    events = [Submit(number, request) for number, request in asked.items()]
    while any(len(first.results[number].tokens) < 5 if number in first.results else True for number in asked):
        first.turn(events)
        events = []
    emitted = {number: tuple(first.results[number].tokens) for number in asked}
    first.turn([Abort(number) for number in asked])
    hasher = BlockHasher(bytes(32), first.loaded.numerics, first.loaded.layout.page_size)
    submits = [Submit(number, request, (emitted[number],), again=True) for number, request in asked.items()]
    export = first.loaded.runner.export
    second.play({
        0: [replace(one, transferred=transferred(first.scheduler, hasher, export, one)) for one in submits]
    })  # fmt: skip
    results = []
    for number in asked:
        result = result_of(second.results, number)
        known = len(emitted[number])
        result.logprobs[:known] = first.results[number].logprobs[:known]
        results.append(result)
    oracle.check(prompts, results, NEAR)
    assert second.scheduler.stats().pages_transferred > sum(map(len, prompts)) // 4 - len(prompts)
    assert second.scheduler.stats().computed_tokens < sum(map(len, prompts))
