"""The cached prefix of a sequence, and the rows that compute the rest: found anew from tokens, without hashes."""

from dataclasses import dataclass

from cache_manager.block_hash import Scope
from cache_manager.prefix import NONE
from cache_manager.publishing import CLOSED
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan
from tests.scheduler.executor import FakeExecutor


def shared_pages(a: Scope, b: Scope, page_size: int) -> int:
    """Up to which page two sequences of the same tokens may share."""
    if a == b:
        return 1 << 30
    public = [0 if s.salt else s.public // page_size for s in (a, b)]
    return min(public)


@dataclass(frozen=True)
class Content:
    """Content of a full page: keys and values, for a layer group, of the last tokens of a prefix."""

    group: int
    prefix: tuple[int, ...]


@dataclass(frozen=True)
class Cached:
    """The cached part of a prefix. count: pages of it. used: by group, those that a sequence going on from it holds."""

    count: int
    used: tuple[tuple[int, ...], ...]


class Oracle:
    """Knows scopes by attempt, and remembers what each page was filled with, and for whom."""

    def __init__(self, scheduler: Scheduler, executor: FakeExecutor, scopes: dict[int, Scope]) -> None:
        self.scheduler, self._executor, self._scopes = scheduler, executor, scopes
        self._layout = scheduler.cache.layout
        self._size = self._layout.page_size
        self._pages: dict[Content, dict[int, Scope]] = {}  # full pages, and for whom each was filled
        self._content: dict[int, Content] = {}  # by page

    def step_launched(self, plan: StepPlan) -> None:
        for page in plan.freed.tolist():
            self._forget(page)
        for row, start, count in plan.slices.tolist():
            mirror = self._executor.rows[row]
            for group, table in enumerate(mirror.tables):
                for index in range(start // self._size, (start + count) // self._size):
                    content = Content(group, tuple(mirror.known[: (index + 1) * self._size]))
                    self._fill(table.told[index], content, self._scopes[mirror.seed])

    def _fill(self, page: int | None, content: Content, scope: Scope) -> None:
        assert page is not None, "a page that was computed has a place"
        self._forget(page)
        self._content[page] = content
        self._pages.setdefault(content, {})[page] = scope

    def _forget(self, page: int) -> None:
        content = self._content.pop(page, None)
        if content is not None:
            del self._pages[content][page]

    def _page_of(self, attempt: int, group: int, tokens: list[int], index: int) -> int | None:
        """The published page of this index of these tokens, which the attempt may use."""
        node_of, scope = self.scheduler.cache.prefix.index.node_of, self._scopes[attempt]
        full = self._pages.get(Content(group, tuple(tokens[: (index + 1) * self._size])), {})
        found = [
            page
            for page, owner in full.items()
            if node_of[page] != NONE and shared_pages(owner, scope, self._size) > index
        ]
        assert len(found) < 2, f"pages {found} have the same content and are both published"
        return found[0] if found else None

    def _first_needed(self, group: int, count: int) -> int:
        """Returns the first of `count` pages that a sequence going on after them holds: what its next token sees."""
        window = self._layout.window(group)
        if window is None or not count:
            return 0
        return min(max(0, count * self._size - window + 1) // self._size, count - 1)

    def cached(self, attempt: int, tokens: list[int]) -> Cached:
        """Finds the longest prefix of these tokens that is valid in all groups; the last token is always computed."""
        groups, indices = range(len(self._layout.groups)), range((len(tokens) - 1) // self._size)
        found = [[self._page_of(attempt, group, tokens, index) for index in indices] for group in groups]
        for count in range(len(indices), 0, -1):
            used = [pages[self._first_needed(group, count) : count] for group, pages in enumerate(found)]
            if all(page is not None for pages in used for page in pages):
                return Cached(count, tuple(tuple(page for page in pages if page is not None) for pages in used))
        return Cached(0, ((),) * len(groups))

    def computing(self, key: tuple[int, int], tokens: list[int], at_join: bool = False) -> list[tuple[int, int]]:
        """Other sequences that run and have yet to publish a page that the cache lacks of these tokens: the first such
        page, or where groups have windows, so that later pages may be there, the next one that they publish.

        at_join: those that publish it next. Not those that publish no more, nor those that compute it only as the end
        of their prompts, which had to, though another row computes it too.
        """
        rows, size, named = self.scheduler.rows, self._size, self.scheduler.cache.published.count
        lacking = self.cached(key[0], tokens).count
        found = []
        for row, mirror in self._executor.rows.items():
            page = lacking if named[row] == CLOSED else max(lacking, int(named[row]))
            late = named[row] != lacking if at_join else page > lacking and not self._layout.windows
            if mirror.key == key or rows.row_of(*mirror.key) != row or late:
                continue
            end = (page + 1) * size
            shares = shared_pages(self._scopes[mirror.seed], self._scopes[key[0]], size) > page
            if end < len(tokens) and mirror.joined >= end + at_join and mirror.known[:end] == tokens[:end] and shares:
                found.append(mirror.key)
        return found
