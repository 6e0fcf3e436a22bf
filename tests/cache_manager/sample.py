"""Short ways to put something into a cache manager."""

from collections.abc import Sequence

import numpy as np

from cache_manager.block_hash import BlockHasher, HashChain, Scope
from cache_manager.manager import CacheManager
from cache_manager.matching import Match
from tests.cache_manager.sequences import SECRET

SHARED = Scope()


def chain(manager: CacheManager, tokens: Sequence[int], scope: Scope = SHARED) -> HashChain:
    made = BlockHasher(SECRET, b"model", manager.layout.page_size).chain(scope)
    made.extend(np.array(tokens, np.int32))
    return made


def match(manager: CacheManager, tokens: Sequence[int], scope: Scope = SHARED) -> Match:
    """Returns the match of all tokens, the last one too."""
    return manager.lookup.match(chain(manager, tokens, scope), len(tokens))


def start(manager: CacheManager, row: int, tokens: Sequence[int], owner: int = -1) -> None:
    """Opens the row with what is cached of the tokens, and pages for all of them."""
    names = chain(manager, tokens)
    found = manager.lookup.match(names, len(tokens) - 1)
    manager.open(row, owner, names, found)
    assert manager.grow(row, found.tokens, len(tokens))


def compute(manager: CacheManager, row: int, start: int, end: int, chunk: int) -> None:
    """Computes some tokens a step, as a scheduler with one step in flight does; full pages are published."""
    while start < end:
        stop = min(end, start + chunk)
        assert manager.grow(row, start, stop)
        manager.published.publish(row, stop, None)
        manager.slide(np.array([row], np.int32), np.array([stop], np.int32))
        start = stop


def leave(manager: CacheManager, tokens: Sequence[int], row: int = 0) -> list[int]:
    """Lets a sequence compute these tokens and leave; returns the pages that they were in."""
    start(manager, row, tokens)
    manager.published.publish(row, len(tokens), None)
    pages = manager.tables.pages_of(0, row).tolist()
    manager.release(row, None)
    return pages


def told(manager: CacheManager) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Returns the page changes of the next plan: grown, copies, freed."""
    changes = manager.pool.take_changes()
    return changes.grown().tolist(), changes.copies().tolist(), sorted(changes.freed_pages().tolist())
