"""Many random operations on the cache manager beside its model: python -m tests.cache_manager.long_run --help.

A run is a row of episodes, each in another pool, ended by closing the books. Each operation is checked by itself, as
cheaply as can be; every so often all that is known is compared.
"""

import argparse
import time
from collections.abc import Callable
from random import Random
from unittest.mock import patch

from cache_manager import pool
from cache_manager.policies import POLICIES
from tests.cache_manager.driver import CacheDriver
from tests.cache_manager.play import PAGE_SIZES, Player
from tests.cache_manager.windows import draw

OPERATIONS_AN_EPISODE = 5000
OPERATIONS_A_CHECK = 250
KINDS = ("full", "full", "full", "hybrid", "pure")


def episode(
    seed: int, operations: int, a_check: int, collisions: bool = False, kinds: tuple[str, ...] = KINDS
) -> CacheDriver:
    """a_check: operations between two checks of everything. collisions: names are so short that they meet. kinds: of
    windows. Returns the world at its end.
    """
    rng = Random(seed)
    page_size = rng.choice(PAGE_SIZES)
    windows = draw(rng, page_size, kinds)
    policy = POLICIES[rng.choice(sorted(POLICIES))]
    pages, rows = rng.randrange(4 * windows.groups, 24 * windows.groups), rng.randrange(2, 7)
    # The share of the pool that evictions free ahead: pools as small as these would have none.
    with patch.object(pool, "AHEAD_PART", Random(~seed).choice((2, 8, pool.AHEAD_PART))):
        world = CacheDriver(page_size, pages, rows, collisions=collisions, make_policy=policy, windows=windows)
    player = Player(world, rng, 6 if windows.any else 4, trouble=rng.random() < 0.5)
    for i in range(operations):
        player.move()
        if i % a_check == 0:
            world.check()
    world.close()
    return world


def run(operations: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> int:
    """Does this number of operations; returns the number of episodes. Raises what an episode raises, with its seed."""
    done, episodes = 0, 0
    while done < operations:
        count = min(OPERATIONS_AN_EPISODE, operations - done)
        try:
            episode(seed + episodes, count, OPERATIONS_A_CHECK)
        except Exception as error:
            error.add_note(f"episode of seed {seed + episodes}, {count} operations")
            raise
        done, episodes = done + count, episodes + 1
        progress(done)
    return episodes


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations on the cache manager, beside a plain model of it.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; each has the next")
    arguments = parser.parse_args()
    started, told = time.monotonic(), 0

    def progress(done: int) -> None:
        nonlocal told
        if done - told >= arguments.operations // 100 or done == arguments.operations:
            told, seconds = done, time.monotonic() - started
            print(f"{done:,} operations in {seconds:,.0f} s, {done / seconds:,.0f} a second", flush=True)

    episodes = run(arguments.operations, arguments.seed, progress)
    print(f"all books balance after {arguments.operations:,} operations in {episodes:,} episodes")


if __name__ == "__main__":
    main()
