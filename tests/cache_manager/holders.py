"""The holders of each page, counted beside the manager."""

from collections import deque
from collections.abc import Iterable

from cache_manager.manager import CacheManager
from tests.cache_manager.histories import Flown, SequenceHistory
from tests.cache_manager.windows import Windows


class Holders:
    """counts: holders of each page. births: how often each was given out. held: pages that have a holder. waiting: for
    a step, pages that lose a holder then. line: cached pages that left a window, by when.

    sources: how often each page is copied from, in the step that is planned. targets: what the next plan copies: from
    which page, by the page that is copied to.
    """

    def __init__(self, manager: CacheManager, page_size: int, windows: Windows, rows: int) -> None:
        self.manager, self.size, self.windows = manager, page_size, windows
        self.rows: list[SequenceHistory | None] = [None] * rows
        self.counts, self.births = [0] * manager.pool.total, [0] * manager.pool.total
        self.held = 0
        self.waiting: list[tuple[int, list[int]]] = []
        self.line: dict[int, int] = {}
        self.flight: deque[Flown] = deque()
        self.sources: dict[int, int] = {}
        self.targets: dict[int, int] = {}
        self.suspects: set[int] = set()
        self.distrusted: set[int] = set()

    def running(self) -> list[int]:
        return [row for row, story in enumerate(self.rows) if story is not None]

    def story(self, row: int) -> SequenceHistory:
        story = self.rows[row]
        assert story is not None, f"row {row} is free"
        return story

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.held += not self.counts[page]
            self.counts[page] += 1
            self.line.pop(page, None)

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.counts[page] -= 1
            if not self.counts[page]:
                self.held -= 1
                self.targets.pop(page, None)

    def _let_go(self, pages: list[int], after_step: int | None) -> None:
        if after_step is None:
            self._drop(pages)
        else:
            self.waiting.append((after_step, pages))

    def _fresh(self, pages: list[int]) -> None:
        """The manager has just given these out."""
        for page in pages:
            assert not self.counts[page], f"page {page} was given out while it is held"
            assert page not in self.suspects, f"page {page} was set aside and given out again"
            self.distrusted.discard(page)
            self.births[page] += 1
        for flown in self.flight:
            assert not flown.touched.intersection(pages), f"pages {pages}: a step in flight still touches one"
        self._hold(pages)

    def _balance(self) -> None:
        """Pages without a holder count as free: cached pages cost nothing."""
        aside = sum(not self.counts[page] for page in self.suspects)
        due = self.manager.pool.total - self.held - aside
        assert self.manager.pool.free == due, f"{self.manager.pool.free} pages can be had, {due} have no holder"
