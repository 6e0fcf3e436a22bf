"""What the prefix cache has of a sequence, and who computes what it lacks: found anew from tokens, without names."""

from cache_manager.manager import CLOSED
from cache_manager.page_names import Scope
from cache_manager.prefix import NONE
from scheduler.scheduler import Scheduler
from tests.scheduler.executor import FakeExecutor


def shared_pages(a: Scope, b: Scope, page_size: int) -> int:
    """Up to which page two sequences of the same tokens may share."""
    if a == b:
        return 1 << 30
    public = [0 if s.salt else s.public // page_size for s in (a, b)]
    return min(public)


class Oracle:
    """Knows scopes by attempt, and remembers who filled each page."""

    def __init__(self, scheduler: Scheduler, executor: FakeExecutor, scopes: dict[int, Scope]) -> None:
        self._scheduler, self._executor, self._scopes = scheduler, executor, scopes
        self._size = scheduler.cache.layout.page_size
        self._filled_by: dict[int, Scope] = {}  # by page

    def step_launched(self) -> None:
        for mirror in self._executor.rows.values():
            for table in mirror.tables:
                for page in table[mirror.cached // self._size : -(-mirror.computed // self._size)]:
                    self._filled_by.setdefault(page, self._scopes[mirror.seed])

    def pages_freed(self, pages: list[int]) -> None:
        for page in pages:
            self._filled_by.pop(page, None)

    def published(self, attempt: int, tokens: list[int]) -> int:
        """Pages of the longest published prefix of these tokens, the last of which is always computed."""
        index, read, size = self._scheduler.cache.prefix.index, self._executor.read, self._size
        after: dict[int, list[int]] = {}
        for node in index.all():
            after.setdefault(index.parent[node], []).append(node)
        count, node = 0, NONE
        while (count + 1) * size < len(tokens):
            wanted = tokens[count * size : (count + 1) * size]
            found = [
                child
                for child in after.get(node, ())
                if read(int(index.pages[0, child])) == wanted
                and shared_pages(self._filled_by[int(index.pages[0, child])], self._scopes[attempt], size) > count
            ]
            if not found:
                break
            (node,) = found
            count += 1
        return count

    def computing(self, attempt: int, tokens: list[int], at_join: bool = False) -> list[int]:
        """Other attempts that run and have yet to publish the first page that the cache lacks of these tokens.

        at_join: without those that publish no more, and those that compute it only as the end of their prompts, which
        had to, whoever else computes it.
        """
        scheduler, size = self._scheduler, self._size
        lacking = self.published(attempt, tokens)
        end = (lacking + 1) * size
        if end >= len(tokens):
            return []
        return [
            mirror.seed
            for row, mirror in self._executor.rows.items()
            if mirror.seed != attempt
            and scheduler.rows.row_of(mirror.seed) == row
            and mirror.joined >= end + at_join
            and mirror.known[:end] == tokens[:end]
            and shared_pages(self._scopes[mirror.seed], self._scopes[attempt], size) > lacking
            and (scheduler.cache.named[row] <= lacking or (scheduler.cache.named[row] == CLOSED and not at_join))
        ]
