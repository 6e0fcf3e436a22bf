"""Prefix lookup: finds what the pool, the host tier and a transfer have of a prompt. Writes nothing.

A prefix is valid where each layer group has every page that the next token sees. A group without a window sees them
all; one with a window lacks pages that left it.
"""

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile

import numpy as np

from cache_manager.allocator import Pages
from cache_manager.block_hash import BlockHash, HashChain
from cache_manager.layout import KVLayout
from cache_manager.matching import NO_MATCH, Match, firsts, valid_pages
from cache_manager.pool import PagePool
from cache_manager.prefix import NONE
from cache_manager.publishing import PublishedPages
from cache_manager.transfers import NO_TRANSFER, TransferredPage


class PrefixLookup:
    """Finds the longest available prefix of a sequence.

    Args:
        layout: Shape of the KV cache.
        pool: The pages, with the prefix index and the host tier.
        published: Publication state of the rows, some of which compute pages that the sequence may wait for.
    """

    def __init__(self, layout: KVLayout, pool: PagePool, published: PublishedPages) -> None:
        self.layout, self._pool, self._published = layout, pool, published
        self._index = pool.prefix.index
        self._groups = range(len(layout.groups))
        self._states = layout.state_tables
        self._windowed = bool(layout.windows)

    def match(
        self, chain: HashChain, most: int, transferred: Mapping[BlockHash, TransferredPage] = NO_TRANSFER
    ) -> Match:
        """Finds the longest published prefix of a sequence.

        The prefix consists of pages in the pool, then pages in the host tier, then transferred pages.

        A prefix may end inside the bidirectional prefix: its hashes depend on all of that, so its KV was computed with
        it. Where a group has a window such a match does not count: later tokens of the span see pages that are gone.

        Args:
            chain: Hashes of the sequence's full pages.
            most: Tokens that the match may have.
            transferred: Pages that came with the sequence, by block hash. Each has those of groups without a window.

        Returns:
            The match. It holds no pages, so it is valid until the cache changes.
        """
        size, tier = self.layout.page_size, self._pool.tier
        most = min(most // size, len(chain.hashes))
        # Without its first page nothing of the prefix can be found: most prompts without a hit end here.
        if not most or (self._unknown(chain.hashes[0]) and chain.hashes[0] not in transferred):
            return NO_MATCH
        nodes = self._index.find(chain, most)
        kept = tier.find(chain, len(nodes), most) if tier is not None and self._pool.swaps else []
        here, next_page = len(nodes) + len(kept), len(nodes)
        received = list(takewhile(transferred.__contains__, islice(chain.hashes, here, most))) if transferred else []
        pages = here + len(received)
        if self._windowed and pages:
            pages = self._valid(nodes, kept, [transferred[block_hash] for block_hash in received])
            nodes, kept, received = nodes[:pages], kept[: max(0, pages - len(nodes))], received[: max(0, pages - here)]
        # With states a prefix ends at a checkpoint. A row to wait for is at the page after all that it has published.
        awaited = self._published.awaited(chain, next_page if self._states else len(nodes), most)
        if self._windowed and pages * size < chain.scope.bidirectional:
            nodes, kept, received, pages = [], [], [], 0
        return Match(pages * size, nodes, kept, received, firsts(self.layout, pages), awaited)

    def pages_of(self, match: Match) -> list[Pages]:
        """Returns the published pages that a match uses, by table."""
        pages = self._index.pages
        used = [pages[g, match.nodes[match.firsts[g] :] if match.firsts else match.nodes] for g in self._groups]
        if self._states:
            here = match.tokens == len(match.nodes) * self.layout.page_size  # else the state is in the host tier
            last = match.nodes[-1:] if here else []
            used += [pages[table, last] for table in self._states]
        return used

    def _unknown(self, block_hash: BlockHash) -> bool:
        """Whether a page is neither published, nor being computed, nor in the host tier."""
        known = block_hash in self._index or block_hash in self._published.frontiers.row_of
        return not known and (self._pool.tier is None or block_hash not in self._pool.tier.copies)

    def _valid(self, nodes: list[int], kept: list[BlockHash], received: Sequence[TransferredPage]) -> int:
        """Returns the number of leading pages that make a valid prefix, as `valid_pages` says.

        Args:
            nodes: Nodes of the first pages.
            kept: Hashes of the following pages, which have copies in the host tier.
            received: Transferred pages after these.
        """
        there = self._index.pages[:, nodes]
        if self._pool.tier is not None and kept:
            there = np.concatenate((there, self._pool.tier.slots_of(kept)), axis=1)
        if received:
            # The rows' pages for them are not chosen yet: any number but NONE.
            come = np.where([page.tables for page in received], 0, NONE).astype(np.int32)
            there = np.concatenate((there, come.T), axis=1)
        return valid_pages(there, self.layout)
