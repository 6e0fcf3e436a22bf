"""A sequence as the plain model of the cache manager knows it, and what it holds."""

from dataclasses import dataclass, field

from cache_manager.block_hash import HashChain, Scope
from cache_manager.manager import CacheManager
from tests.cache_manager.device import Table


def tables(manager: CacheManager, row: int) -> list[Table]:
    """The row's pages by group, as the manager has them."""
    groups = range(len(manager.layout.groups))
    return [Table(int(manager.tables.first[g, row]), manager.tables.pages_of(g, row).tolist()) for g in groups]


@dataclass
class SequenceHistory:
    """A sequence. tokens: all, drawn ones in flight included; known: how many of them the host knows. scheduled:
    computed or being computed; computed: of these, what steps that have retired computed. last_step: that touches its
    pages. table: [groups]. past: pages that it let go behind a window, each with the number of its birth. published:
    pages that it has named. rivalled: another one came to the next of these too. silent: publishes no more. unsure: it
    may, but need not. forked: shares pages since it last grew. serial: another one each time that it is given a row.
    """

    attempt: int
    tokens: list[int]
    scope: Scope
    goal: int
    chain: HashChain | None
    known: int = 0
    scheduled: int = 0
    computed: int = 0
    last_step: int = -1
    numbers: list[int] = field(default_factory=list)
    table: list[Table] = field(default_factory=list)
    past: set[tuple[int, int]] = field(default_factory=set)
    silent: bool = False
    unsure: bool = False
    published: int = 0
    rivalled: bool = False
    forked: bool = False
    serial: int = 0

    @property
    def need(self) -> int:
        """Tokens to compute; the last one of all is never computed."""
        return min(len(self.tokens), self.goal - 1) - self.scheduled

    @property
    def pages(self) -> list[int]:
        """Group by group."""
        return [page for table in self.table for page in table.pages]

    @property
    def slots(self) -> int:
        """Pages up to whose end it has slots in every group."""
        return min(table.end for table in self.table)


@dataclass
class Flown:
    """A step in flight. work: row, serial and the end of what it computes; draws: serials."""

    step: int
    work: list[tuple[int, int, int]]
    draws: list[int]
    touched: set[int]
    written: set[int]
