"""Pages that were swapped to the host and back change no bit of anybody's logits; a copy that is spoilt is noticed and
computed anew.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_manager.layout import KVLayout
from cache_manager.tier import HostTier
from model.page_store import PageStore
from model.reference.attention_backend import ReferenceAttention
from scheduler.costs import FEWEST_PAGES, SwapCost
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.checkpoints import write_llama4, write_ministral, write_mistral
from tests.support.engines import Rig, make_request, make_rig
from tests.support.pages import exported
from tests.support.planted import plant
from tests.support.swaps import always_swap

pytestmark = pytest.mark.sample(3)

NEW = 10
# None passes another, and `make_rig` makes no forecast: rows are preempted in each run alike.
PIPELINED = SchedulerSettings(24, 4, 8, 2, backfill_time=0.0)
PLAIN = SchedulerSettings(32, 4, backfill_time=0.0)


@pytest.fixture(autouse=True)
def _always_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    always_swap(monkeypatch)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    head, other = random_prompts([48, 40], seed=41)
    tails = random_prompts([3, 9, 30, 70], seed=42)
    return [head + tail for tail in tails] + [other, other + tails[1], head * 3]


@pytest.fixture(scope="module")
def alone(tiny: Path, prompts: list[list[int]]) -> Rig:
    rig = make_rig(tiny, record_logits=True, prefix_cache=False)
    for i, prompt in enumerate(prompts):
        rig.run({i: make_request(rig, prompt, NEW)})
    return rig


def pressed(
    directory: Path,
    prompts: list[list[int]],
    page_size: int,
    host: int,
    scheduling: SchedulerSettings,
    rounds: int = 3,
    record: bool = True,
) -> Rig:
    """All prompts several times over, in a pool that holds the longest of them and little else."""
    rig = make_rig(directory, page_size, 168, scheduling, record_logits=record, queue=ENDLESS, host_pages=host)
    for again in range(rounds):
        rig.run({100 * again + i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    return rig


def check(alone: Rig, rig: Rig, prompts: list[list[int]]) -> None:
    for attempt, result in rig.results.items():
        assert result.tokens == alone.results[attempt % 100].tokens
        if rig.logits:
            assert rig.logits_of(attempt) == alone.logits_of(attempt % 100)
    assert len(rig.results) % len(prompts) == 0


@pytest.mark.parametrize("scheduling", [PLAIN, PIPELINED], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize(("page_size", "host"), [(1, 700), (4, 200), (4, 20), (16, 60)])
def test_swapped_pages_change_no_bit(
    tiny: Path, prompts: list[list[int]], alone: Rig, page_size: int, host: int, scheduling: SchedulerSettings
) -> None:
    rig = pressed(tiny, prompts, page_size, host, scheduling)
    check(alone, rig, prompts)
    stats = rig.scheduler.stats()
    assert stats.swapped_out > 100 / page_size
    assert stats.swapped_in > min(host, 100) / page_size
    assert (stats.host_slots_used == host) == (host <= 20)
    assert not stats.swap_lost


WINDOWED = {
    "alternating": lambda path: write_ministral(path, 20, "sfsf"),
    "mostly windows": lambda path: write_ministral(path, 9, "sssf"),
    "windows alone": lambda path: write_mistral(path, 24),
    "short windows alone": lambda path: write_mistral(path, 3),
    "mostly chunks": lambda path: write_llama4(path, 20),
}


@pytest.mark.parametrize(
    ("kind", "page_size", "host", "comes_back"),
    [
        ("alternating", 4, 600, True),
        ("alternating", 16, 20, True),
        ("windows alone", 4, 60, True),
        ("mostly chunks", 4, 600, True),
        ("mostly windows", 4, 60, False),  # what left its window goes first, and is gone
        ("short windows alone", 4, 60, False),
    ],
)
def test_windows(
    tmp_path: Path, prompts: list[list[int]], kind: str, page_size: int, host: int, comes_back: bool
) -> None:
    """Pages of groups with windows come back as far as the next token sees."""
    directory = WINDOWED[kind](tmp_path)
    alone = make_rig(directory, record_logits=True, prefix_cache=False)
    for i, prompt in enumerate(prompts):
        alone.run({i: make_request(alone, prompt, NEW)})
    rig = pressed(directory, prompts, page_size, host, PIPELINED)
    check(alone, rig, prompts)
    assert bool(rig.scheduler.stats().swapped_in) == comes_back


def test_the_host_saves_computing(tiny: Path, prompts: list[list[int]]) -> None:
    """In the last rounds all of it is there, but for the page that each prompt ends in."""
    with_host, without = (pressed(tiny, prompts, 4, host, PLAIN).scheduler.stats() for host in (400, 0))
    assert with_host.computed_tokens <= without.computed_tokens / 2


def test_a_preempted_sequence_comes_back_from_the_host(tiny: Path) -> None:
    """Three that do not fit together: the one that gives way finds what it had computed again."""
    prompts = random_prompts([60, 60, 60], seed=44)
    scheduling = SchedulerSettings(max_sequences=3, max_batched_tokens=256)
    rigs = [make_rig(tiny, 4, 200, scheduling, host_pages=host) for host in (0, 100)]
    for rig in rigs:
        rig.run({i: make_request(rig, prompt, 40) for i, prompt in enumerate(prompts)})
    without, with_host = (rig.scheduler.stats() for rig in rigs)
    assert without.preemptions
    assert with_host.preemptions
    assert with_host.recomputed_tokens < without.recomputed_tokens / 2
    assert [rigs[0].results[i].tokens for i in range(3)] == [rigs[1].results[i].tokens for i in range(3)]


def flip_a_bit(store: PageStore) -> None:
    store.content[:, 0] ^= 1


def flip_the_last_bit(store: PageStore) -> None:
    store.content[:, -1] ^= 128


def mix_up_slots(store: PageStore) -> None:
    store.content.copy_(store.content.roll(1, 0))


def change_a_checksum(store: PageStore) -> None:
    store.checksums += np.uint64(1)


@pytest.mark.parametrize("scheduling", [PLAIN, PIPELINED], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize("spoil", [flip_a_bit, flip_the_last_bit, mix_up_slots, change_a_checksum])
def test_a_spoilt_copy_is_computed_anew(
    tiny: Path,
    prompts: list[list[int]],
    alone: Rig,
    spoil: Callable[[PageStore], None],
    scheduling: SchedulerSettings,
) -> None:
    rig = pressed(tiny, prompts, 4, 200, scheduling, rounds=2, record=False)
    store = rig.loaded.runner.page_moves.store
    assert store is not None
    store.settle()
    spoil(store)
    rig.run({100 * 7 + i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    check(alone, rig, prompts)
    assert rig.scheduler.stats().swap_lost


def test_a_store_that_does_not_look_is_noticed(
    tiny: Path, prompts: list[list[int]], alone: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = pressed(tiny, prompts, 4, 200, PLAIN, rounds=2, record=False)
    store = rig.loaded.runner.page_moves.store
    assert store is not None
    store.settle()
    store.content += 1
    plant(monkeypatch, PageStore, "_checksum", lambda _: lambda self, slot: self.checksums[slot])
    rig.run({100 * 7 + i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    with pytest.raises(AssertionError):
        check(alone, rig, prompts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_a_page_comes_back_bit_for_bit(dtype: str) -> None:
    element, scale = {"float32": (4, 0), "bfloat16": (2, 0)}.get(dtype, (1, 4))
    layout = KVLayout.uniform(((0, 1, 2),), 2, 6, element, 5, scale)
    attention = ReferenceAttention(layout, 9, 4, dtype, torch.device("cpu"))
    places = attention.pool.places(0, np.arange(9 * 5))
    for layer in range(3):
        attention.pool.write(layer, places, *(torch.randn(45, 2, 6) for _ in range(2)))
    store = PageStore(attention, 4, layout.page_bytes, b"model")
    before = exported(attention, range(9))
    assert before.shape == (9, layout.page_bytes)
    store.save(np.array([[7, 0, 0], [2, 3, 0]], np.int32))
    assert not len(store.load(np.array([[0, 1, 0], [3, 8, 0]], np.int32)))
    after = exported(attention, range(9))
    assert torch.equal(after, before[[0, 7, 2, 3, 4, 5, 6, 7, 2]])


def test_pages_of_another_model_do_not_come_back() -> None:
    """Their bytes and sums are whole; what the numbers mean differs."""
    layout = KVLayout.uniform(((0, 1, 2),), 2, 6, 4, 5)
    attention = ReferenceAttention(layout, 9, 4, "float32", torch.device("cpu"))
    attention.pool.write(0, attention.pool.places(0, np.arange(9 * 5)), *(torch.randn(45, 2, 6) for _ in range(2)))
    before = exported(attention, range(9))
    stores = [PageStore(attention, 4, layout.page_bytes, name) for name in (b"model", b"other")]
    for store in stores:
        store.save(np.array([[7, 0, 0]], np.int32))
        store.settle()
    stores[1].content, stores[1].checksums = stores[0].content, stores[0].checksums
    assert stores[1].load(np.array([[0, 1, 0]], np.int32)).tolist() == [1]
    assert torch.equal(exported(attention, range(9)), before)
    assert not len(stores[0].load(np.array([[0, 1, 0]], np.int32)))


def test_canonical_form_is_keys_then_values_by_token() -> None:
    layout = KVLayout.uniform(((0, 1),), 2, 4, 4, 3)
    attention = ReferenceAttention(layout, 2, 2, "float32", torch.device("cpu"))
    written = torch.randn(2, 2, 3, 2, 4)  # layer, K or V, token, head, element
    for layer in range(2):
        attention.pool.write(layer, attention.pool.places(0, np.arange(3, 6)), *written[layer])
    (page,) = exported(attention, [1])
    assert torch.equal(page.view(torch.float32), written.reshape(-1))


def test_swapping_stops_where_computing_is_quicker(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cost = make_rig(tiny, 4, 168, PLAIN, host_pages=20), SwapCost()
    rig.run({0: make_request(rig, list(range(1, 11)), 1)})  # the first step always swaps
    monkeypatch.undo()
    measured = SwapCost.page_seconds.fget
    monkeypatch.setattr(SwapCost, "page_seconds", property(lambda _: measured(cost)))

    def swaps() -> bool:
        rig.turn()
        return rig.scheduler.cache.pool.swaps

    assert swaps()  # nothing is known
    for tokens in (1, 32, 1, 32):
        rig.scheduler.backpressure.observe_step(tokens, 0.001 * tokens)
    cost.observe(FEWEST_PAGES, 0.005 * FEWEST_PAGES)
    assert not swaps()
    cost.observe(1000, 0.0001)
    assert swaps()


def test_a_tier_needs_room_for_a_page() -> None:
    with pytest.raises(ValueError, match="at least 2 slots"):
        HostTier(1, 2)
