"""Pages of one engine's cache that another engine may go on from: which of them it needs, and how they arrive.

A sequence that goes on needs of each group without a window all pages, of each group with one those that its next token
sees, and of recurrent layers the state before that token. Nothing else is worth the copy: a state may take as many
bytes as a thousand tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.block_hash import BlockHash
from cache_manager.layout import KVLayout
from cache_manager.matching import valid_pages
from cache_manager.prefix import NONE


@dataclass(frozen=True, slots=True, eq=False)
class TransferredPage:
    """Content of the pages of one index of a sequence, as another engine gave it.

    Attributes:
        tables: [tables] bool. Whether there is a page of each page table.
        content: uint8 [n, page_bytes]. These n pages in order of their tables, in canonical form.
    """

    tables: NDArray[np.bool_]
    content: NDArray[np.uint8]

    def of(self, table: int) -> NDArray[np.uint8]:
        """Returns uint8 [page_bytes] the page of a table that has one."""
        page: NDArray[np.uint8] = self.content[np.count_nonzero(self.tables[:table])]
        return page


NO_TRANSFER: Mapping[BlockHash, TransferredPage] = {}


def pages_to_transfer(pages: Pages, layout: KVLayout) -> Pages:
    """Chooses what another engine needs of consecutive published pages.

    Args:
        pages: [tables, n] int32. The pages, NONE where a table has lost one. They may begin within a sequence: the
            other engine has all that its windows reach before them.
        layout: Windows and states of the tables.

    Returns:
        [tables, m] int32, m at most n: the pages up to the last one that a sequence can go on after. NONE where it does
        not need the page.
    """
    if not layout.windows:
        return pages
    count = valid_pages(pages, layout)
    needed = pages[:, :count].copy()
    for group, window in enumerate(layout.windows[: len(layout.groups)]):
        if window is not None:
            needed[group, : max(0, count - layout.pages_before(window))] = NONE
    needed[layout.state_tables, : max(0, count - 1)] = NONE
    return needed
