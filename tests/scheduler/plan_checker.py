"""An executor's view of a row: its tokens, and the pages that plans mentioned.

Plans do not mention pages that left a window: its table goes on naming them, and it must not look there any more.
"""

from dataclasses import dataclass, field

from cache_manager.layout import KVLayout


@dataclass(eq=False)
class Table:
    """Pages of one row in one layer group. told: by index, None before the first that the row was given. first: from
    this index on they are live; what stands before is seen from no position to come, and may be another row's.
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
        """The row keeps the pages of this number of tokens."""
        del self.told[-(-length // self.size) :]

    def forget(self, computed: int) -> int:
        """Positions below this one are computed. Returns how many pages are live no more."""
        before, self.first = self.first, max(self.first, self.seen(computed))
        return self.first - before


@dataclass(eq=False)
class PlanChecker:
    """A row.

    Attributes:
        known: Its tokens, drawn ones included.
        joined: Number of tokens that came with the join.
        cached: Number of these in the pages that it joined on.
        computed: KV written so far, or found.
        collected: KV that was computed in steps whose results the scheduler has.
        had: Pages that it has or had, and no other row got since.
        broken: It has faulted, so all that it draws is void.
        stuck: Tokens in whose place nothing is left to draw.
        offers: Number of its likeliest tokens that it reports each time; a search goes by them.
        waits: Its last token is to be forced by a search.
        bidirectional: Number of tokens at its front that one step computes, all that are left.
        drafts: Tokens that the step in flight computes behind its last one.
        rejected: It drew more than counts, so the last token that counts is to be forced.
        drawn_at: Position of its last draw.
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
    drawn_at: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.seed, self.index

    def pages(self) -> list[int]:
        return [page for table in self.tables for page in table.live if page is not None]


def tables_of(layout: KVLayout) -> list[Table]:
    return [Table(layout.window(group), layout.page_size) for group in range(len(layout.groups))]
