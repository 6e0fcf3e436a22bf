"""An executor's view of a row: its tokens, and the pages that plans mentioned.

Of pages that left a window it is told nothing: its table goes on naming them, and it must not look there any more.
"""

from dataclasses import dataclass, field

from cache_manager.layout import KVLayout


@dataclass(eq=False)
class Table:
    """Pages of one row in one layer group. told: by index, None before the first that the row was given. first: from
    this index on they are live; what stands before is seen from no position to come, whoever has it now.
    """

    window: int | None
    size: int
    told: list[int | None] = field(default_factory=list)
    first: int = 0

    @property
    def live(self) -> list[int | None]:
        return self.told[self.first :]

    @property
    def given(self) -> int:
        """Index of the first page that the row was given."""
        return next((i for i, page in enumerate(self.told) if page is not None), 0)

    def start(self, index: int) -> None:
        """The row's first page will be this one."""
        self.told, self.first = [None] * index, index

    def sees(self, position: int) -> int:
        """The first position that this one sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def seen(self, position: int) -> int:
        """Index of the first page that this position sees."""
        return self.sees(position) // self.size

    def truncate(self, length: int) -> None:
        """The row keeps the pages of so many tokens."""
        del self.told[-(-length // self.size) :]

    def forget(self, computed: int) -> int:
        """Positions below this one are computed. Returns how many pages are live no more."""
        before, self.first = self.first, max(self.first, self.seen(computed))
        return self.first - before


@dataclass(eq=False)
class PlanChecker:
    """A row. known: its tokens, drawn ones included. joined: how many came with the join. cached: how many of these
    were in the pages that it joined on. computed: KV written so far, or found. collected: those of them that the
    scheduler was told of. had: pages that it has or had, and nobody else got since. broken: it has faulted, whatever it
    draws is void. stuck: where it would draw one of these, nothing is left to draw. offers: how many of its likeliest
    tokens it tells of each time; a search goes by them. waits: its last token is to be given by a search.
    bidirectional: so many tokens at its front are computed in one step, all that are left. drafts: tokens that the step
    in flight computes behind its last one. rejected: it drew more than what counts, so it is to be given the last that
    does.
    """

    seed: int
    known: list[int]
    joined: int
    tables: list[Table]
    cached: int = 0
    computed: int = 0
    collected: int = 0
    had: set[int] = field(default_factory=set)
    broken: bool = False
    stuck: frozenset[int] = frozenset()
    index: int = 0
    offers: int = 0
    waits: bool = False
    bidirectional: int = 0
    drafts: list[int] = field(default_factory=list)
    rejected: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.seed, self.index

    def pages(self) -> list[int]:
        return [page for table in self.tables for page in table.live if page is not None]


def tables_of(layout: KVLayout) -> list[Table]:
    return [Table(layout.window(group), layout.page_size) for group in range(len(layout.groups))]
