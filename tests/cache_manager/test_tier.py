"""The host tier's books: which copies there are, what goes out and comes back, and what is dropped."""

from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache_manager.block_hash import HASH_BYTES, BlockHash, BlockHasher
from cache_manager.ledger import verify
from cache_manager.manager import CacheManager
from cache_manager.policies import POLICIES
from cache_manager.prefix import NONE
from cache_manager.tier import FIRST, Copy, HostTier
from cache_manager.transfers import TransferredPage
from tests.cache_manager.play import PAGE_SIZES, Player
from tests.cache_manager.sequences import SECRET, make_layout
from tests.cache_manager.tiered import TieredCacheDriver
from tests.cache_manager.windows import draw

KINDS = ("full", "full", "hybrid", "pure")


def episode(seed: int, operations: int, a_check: int, spoils: float = 0.2) -> TieredCacheDriver:
    rng = Random(seed)
    size = rng.choice(PAGE_SIZES)
    windows = draw(rng, size, KINDS)
    pages, slots = rng.randrange(4, 14) * windows.groups, rng.randrange(1, 30) * windows.groups
    policy = POLICIES[rng.choice(sorted(POLICIES))]
    world = TieredCacheDriver(
        slots, rng, spoils, page_size=size, pages=pages, rows=rng.randrange(2, 6), make_policy=policy, windows=windows
    )
    player = Player(world, rng, 6, trouble=rng.random() < 0.5)
    for i in range(operations):
        world.manager.pool.swaps = rng.random() < 0.9
        player.move()
        if i % a_check == 0:
            world.check()
    world.manager.pool.swaps = True
    world.close()
    return world


@pytest.mark.parametrize("first", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_random_play(first: int) -> None:
    worlds = [episode(seed, 1500, a_check=25) for seed in range(first, first + 20)]
    assert sum(world.out for world in worlds) > 500
    assert sum(world.back for world in worlds) > 250
    assert sum(world.spoilt for world in worlds) > 10


class Small:
    """Pages of 2 tokens; sequences come and leave one after the other."""

    def __init__(self, pages: int, slots: int, hasher: BlockHasher | None = None) -> None:
        self.tier = HostTier(slots)
        self.manager = CacheManager(make_layout(2), pages, 2, tier=self.tier)
        self.hasher = BlockHasher(SECRET, b"model", 2) if hasher is None else hasher

    def serve(self, *tokens: int) -> tuple[int, list[list[int]], list[list[int]]]:
        """Tokens that were there, and what its plan copied: out, back."""
        chain = self.hasher.chain()
        chain.extend(np.array(tokens, np.int32))
        match = self.manager.lookup.match(chain, len(tokens) - 1)
        self.manager.open(0, 0, chain, match)
        assert self.manager.grow(0, match.tokens, len(tokens))
        self.manager.fetch(0, match)
        changes = self.manager.pool.take_changes()
        self.manager.published.publish(0, len(tokens), None)
        self.manager.release(0, None)
        verify(self.manager)
        return match.tokens, changes.swap_outs().tolist(), changes.swap_ins().tolist()

    def kept(self) -> list[list[int]]:
        """Tokens of the copies, the least recently used first."""
        return [np.frombuffer(copy.content[:8], "<i4").tolist() for copy in self.tier.copies.values()]


def test_what_is_evicted_goes_out_and_comes_back() -> None:
    small = Small(pages=3, slots=4)
    assert small.serve(1, 1, 2, 2, 3) == (0, [], [])
    _, out, _ = small.serve(4, 4, 5, 5, 6)  # takes the places of both
    assert len(out) == 2
    tokens, out, back = small.serve(1, 1, 2, 2, 3)
    assert (tokens, len(out), len(back)) == (4, 2, 2)
    assert small.tier.used == 4
    tokens, out, _ = small.serve(4, 4, 5, 5, 6)
    assert (tokens, out) == (4, [])  # the copies of what goes out are still there


def test_what_a_sequence_came_with_has_its_place_after_the_copies() -> None:
    small = Small(pages=4, slots=4)
    small.serve(1, 1, 2, 2, 3)
    small.serve(4, 4, 5, 5, 6, 6, 7)
    chain = small.hasher.chain()
    chain.extend(np.array([1, 1, 2, 2, 3, 3], np.int32))
    page = TransferredPage(np.ones(1, np.bool_), np.zeros((1, small.manager.layout.page_bytes), np.uint8))
    match = small.manager.lookup.match(chain, 6, transferred=dict.fromkeys(chain.hashes[2:], page))
    assert (match.tokens, match.nodes, match.kept, match.transferred) == (6, [], chain.hashes[:2], chain.hashes[2:])
    small.manager.open(0, 0, chain, match)
    assert small.manager.grow(0, 6, 7)
    small.manager.fetch(0, match)
    back = small.manager.pool.take_changes().swap_ins()[:, 1].tolist()
    table = small.manager.tables.row(0).tolist()
    assert (back, small.manager.transfer_targets(0, match).tolist()) == (table[:2], [table[2:3]])


def test_the_least_recently_used_copy_goes_first() -> None:
    small = Small(pages=2, slots=2)
    for token in (1, 2, 3, 4):
        small.serve(token, token, 9)
    assert small.kept() == [[2, 2], [3, 3]]
    small.serve(2, 2, 9)  # comes back, and is now the latest
    assert small.kept() == [[2, 2], [4, 4]]


def test_a_copy_goes_with_the_one_before_it() -> None:
    """The second page of the first sequence is of no use without the first."""
    small = Small(pages=3, slots=2)
    small.serve(1, 1, 2, 2, 3)
    small.serve(4, 4, 5, 5, 6)
    assert small.kept() == [[2, 2], [1, 1]]
    small.serve(7, 7, 8, 8, 9)
    assert small.kept() == [[5, 5], [4, 4]]


def test_copies_after_one_page_are_dropped_in_order_of_their_age() -> None:
    """Not in an order of their hashes: slots, and so plans, would depend on the process."""
    small, nexts = Small(pages=4, slots=20), [20, 11, 17, 13, 19, 12, 18, 14]
    for token in nexts:
        small.serve(1, 1, token, token, 9)
    small.serve(2, 2, 3, 3, 4, 4, 9)  # evicts all of them
    slots = {copy.content[:4]: copy.slots[0] for copy in small.tier.copies.values()}
    first = next(copy.parent for copy in small.tier.copies.values() if copy.parent != FIRST)
    before = small.tier.free_slots()
    small.tier.forget([first])
    freed = small.tier.free_slots()[len(before) :]
    contents = [np.int32(token).tobytes() for token in (1, *reversed(nexts))]
    assert freed == [slots[content] for content in contents]


def test_nothing_new_goes_out_while_it_does_not_pay() -> None:
    small = Small(pages=3, slots=4)
    small.serve(1, 1, 2, 2, 3)
    small.manager.pool.swaps = False
    assert small.serve(4, 4, 5, 5, 6) == (0, [], [])
    assert small.tier.used == 0


def test_a_copy_that_is_due_back_is_not_overwritten() -> None:
    """Its only slot is wanted for what is evicted to make room for it."""
    small = Small(pages=2, slots=1)
    small.serve(1, 1, 9)
    _, out, _ = small.serve(2, 2, 9)
    assert [slot for _, slot in out] == [0]
    tokens, out, back = small.serve(1, 1, 9)
    assert (tokens, out, [slot for slot, _ in back]) == (2, [], [0])


def test_a_spoilt_copy_is_dropped_and_its_row_told() -> None:
    small = Small(pages=2, slots=2)
    small.serve(1, 1, 9)
    small.serve(2, 2, 9)
    small.manager.pool.begin(0.0, 7)
    chain = small.hasher.chain()
    chain.extend(np.array([1, 1], np.int32))
    match = small.manager.lookup.match(chain, 2)
    small.manager.open(1, 5, chain, match)
    small.manager.grow(1, 2, 3)
    small.manager.fetch(1, match)
    ((_, page),) = small.manager.pool.take_changes().swap_ins().tolist()
    assert small.manager.arrived(7, [page]) == [1]
    assert small.tier.lost == 1
    assert [1, 1] not in small.kept()


def test_of_copies_that_come_back_the_first_pages_stay_longest() -> None:
    small = Small(pages=3, slots=4)
    small.serve(1, 1, 2, 2, 3)
    small.serve(4, 4, 5, 5, 6)
    small.serve(1, 1, 2, 2, 3)
    assert small.kept() == [[2, 2], [1, 1], [5, 5], [4, 4]]


def test_each_spoilt_page_is_counted() -> None:
    small = Small(pages=3, slots=4)
    small.serve(1, 1, 2, 2, 3)
    small.serve(4, 4, 5, 5, 6)
    small.manager.pool.begin(0.0, 7)
    *_, back = small.serve(1, 1, 2, 2, 3)
    small.manager.arrived(7, [page for _, page in back])
    assert small.tier.lost == 2


def test_copies_that_a_distrusted_row_went_on_from_are_dropped() -> None:
    small = Small(pages=3, slots=4)
    small.serve(1, 1, 2, 2, 3)
    small.serve(4, 4, 5, 5, 6)
    chain = small.hasher.chain()
    chain.extend(np.array([1, 1, 2, 2], np.int32))
    match = small.manager.lookup.match(chain, 4)
    small.manager.open(1, 5, chain, match)
    small.manager.grow(1, 4, 5)
    small.manager.fetch(1, match)
    small.manager.published.distrust(1)
    assert small.kept() == [[5, 5], [4, 4]]


def two_evicted_nodes() -> Any:
    """In place of a prefix index: node 0 has no pages, node 1 after it has page 5."""
    names = [bytes([number]) * HASH_BYTES for number in (1, 2)]
    return SimpleNamespace(
        hashes=lambda nodes: [names[node] for node in nodes],
        content=lambda node: b"",
        parent=[NONE, 0],
        pages=np.array([[NONE, 5]], np.int32),
    )


def test_a_copy_without_pages_goes_with_the_last_one_after_it() -> None:
    """It was kept as the way to that one. By itself a node without pages gets no copy, so the way is forgotten too."""
    tier, index = HostTier(2), two_evicted_nodes()
    first, second = index.hashes([0, 1])
    assert tier.keep(index, [1, 0]) == [(5, 0)]
    assert tier.copies == {first: Copy(FIRST, b"", (NONE,)), second: Copy(first, b"", (0,))}
    tier.forget([second])
    assert (tier.copies, tier.used) == ({}, 0)
    assert tier.keep(index, [0]) == []
    assert tier.copies == {}


class Collisions(BlockHasher):
    """Gives two pages one name where `alike` maps the first tokens of their contents to one number."""

    def __init__(self, alike: dict[int, int]) -> None:
        super().__init__(SECRET, b"model", 2)
        self.alike = alike

    def link(self, parent: BlockHash, contents: Iterable[bytes]) -> list[BlockHash]:
        return [bytes([self.alike[content[0]]]) * HASH_BYTES for content in contents]


def test_a_copy_of_another_content_with_the_same_name_is_not_found() -> None:
    small = Small(2, 2, Collisions({1: 7, 2: 7, 3: 7}))
    small.serve(1, 1, 9)
    small.serve(2, 2, 9)
    assert small.kept() == [[1, 1]]
    assert small.serve(3, 3, 9)[0] == 0


def test_a_copy_that_comes_after_another_page_is_not_found() -> None:
    small = Small(3, 4, Collisions({1: 1, 2: 2, 5: 5, 6: 6}))
    small.serve(1, 1, 5, 5, 9)
    small.serve(2, 2, 6, 6, 9)
    assert small.kept() == [[5, 5], [1, 1]]
    assert small.serve(2, 2, 5, 5, 9)[0] == 2


def test_a_copy_makes_way_for_another_content_with_its_name() -> None:
    small = Small(2, 2, Collisions({1: 7, 2: 7, 3: 7}))
    small.serve(1, 1, 9)
    small.serve(2, 2, 9)
    _, out, _ = small.serve(3, 3, 9)
    assert (len(out), small.kept()) == (1, [[2, 2]])
    assert small.serve(2, 2, 9)[0] == 2


def test_a_tier_needs_room_for_a_page() -> None:
    with pytest.raises(ValueError, match="at least 2 slots"):
        HostTier(1, 2)
