"""A device that remembers, instead of keys and values, which prefix every slot of every page was computed from.

Two slots may stand for each other exactly where their numbers are equal: a number stands for all that the KV of a
position depends on (all tokens so far, images, spans that hit whole) and for who may see it (tenant, salt, public).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_manager.block_hash import Scope
from cache_manager.changes import PageChanges
from tests.cache_manager.windows import first_seen

NOTHING = 0  # in a slot: no row may read this


class Prefixes:
    """Numbers prefixes, each once. before: [numbers] the prefix that is one position shorter."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}
        self.before = [NOTHING]

    def after(self, before: int, what: object) -> int:
        number = self._numbers.get((before, what))
        if number is None:
            number = self._numbers[before, what] = len(self.before)
            self.before.append(before)
        return number

    def shorter(self, number: int, by: int) -> int:
        """Returns the prefix that is this number of positions shorter."""
        for _ in range(by):
            number = self.before[number]
        return number

    def extend(self, numbers: list[int], tokens: list[int], scope: Scope, page_size: int) -> None:
        """Adds to `numbers` those of the positions up to the end of `tokens`."""
        public = 0 if scope.salt or scope.bidirectional else scope.public // page_size
        if numbers:
            number = numbers[-1]
        else:
            number = self.after(
                NOTHING, (tuple(tokens[: scope.bidirectional]), scope.images) if scope.bidirectional else "causal"
            )
        for position in range(len(numbers), len(tokens)):
            audience = "all" if position // page_size < public else (scope.tenant, scope.salt)
            seen = tuple(image for image in scope.images if image.start <= position < image.end)
            number = self.after(number, (tokens[position], audience, seen))
            numbers.append(number)


@dataclass
class Table:
    """Pages of a row in a layer group, from that of index `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def between(self, start: int, end: int) -> list[int]:
        """Pages of the indices start .. end - 1, as far as there are any."""
        return self.pages[max(0, start - self.first) : max(0, end - self.first)]

    def copy(self) -> "Table":
        return Table(self.first, self.pages.copy())

    def cut(self, first: int) -> list[int]:
        """Takes out the pages before this index."""
        gone = self.between(self.first, first)
        self.first, self.pages = max(self.first, first), self.pages[len(gone) :]
        return gone


class Device:
    """Executes plans in order, at once. windows: by group. slots: [pages][page_size] numbers. group: [pages] of the
    last write. tables: [rows][groups] as told, but for what no position to come sees. computed: [rows] positions.
    users: [pages] in how many tables each stands.
    """

    def __init__(self, windows: Sequence[int | None], pages: int, page_size: int, rows: int) -> None:
        self.page_size, self.windows = page_size, windows
        self.slots = [[NOTHING] * page_size for _ in range(pages)]
        self.group = [NOTHING] * pages
        self.tables = [[Table() for _ in windows] for _ in range(rows)]
        self.computed = [0] * rows
        self.users = [0] * pages

    def apply(self, leaves: list[int], changes: PageChanges) -> None:
        """Applies what comes before a step computes, in the order of a step plan; freed pages lose their content."""
        for page in changes.freed_pages().tolist():
            self.slots[page] = [NOTHING] * self.page_size
        for row in leaves:
            self._leave(row)
        for group, row, index, page in changes.grown().tolist():
            self._grow(group, row, index, page)
        copies = changes.copies().tolist()
        if copies:
            sources, targets = {source for source, _ in copies}, [target for _, target in copies]
            assert not sources.intersection(targets), f"a page is source and target of copies {copies}"
            assert len(set(targets)) == len(targets), f"a page is the target of two copies {copies}"
            for source, target in copies:
                self.slots[target] = self.slots[source].copy()
                self.group[target] = self.group[source]

    def _leave(self, row: int) -> None:
        for group, table in enumerate(self.tables[row]):
            self._unuse(table.pages)
            self.tables[row][group] = Table()
        self.computed[row] = 0

    def _unuse(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1

    def _grow(self, group: int, row: int, index: int, page: int) -> None:
        table, window = self.tables[row][group], self.windows[group]
        if index < first_seen(window, self.computed[row]) // self.page_size:
            return  # no position to come sees it
        if not table.pages and not self.computed[row]:
            assert index == 0 or window is not None, f"row {row} was told page {page} at index {index}, it has none"
            table.first = index
        assert table.first <= index <= table.end, f"row {row} was told page {page} at index {index}, it has {table}"
        if index < table.end:
            self.users[table.pages[index - table.first]] -= 1
            table.pages[index - table.first] = page
        else:
            table.pages.append(page)
        self.users[page] += 1

    def read(self, table: Table, group: int, numbers: list[int], start: int, end: int) -> None:
        """The pages of this table, which belongs to a group, must hold the positions below `end` of a sequence that
        the one at `start` sees.
        """
        size, slots = self.page_size, self.slots
        seen = first_seen(self.windows[group], start)
        index = seen // size
        while index * size < end:
            first, last = max(seen, index * size), min(end, (index + 1) * size)
            assert table.first <= index < table.end, f"there is no page of index {index} in {table}"
            page = table.pages[index - table.first]
            have, due = slots[page][first - index * size : last - index * size], numbers[first:last]
            assert have == due, f"page {page} holds {have} where a sequence needs {due}"
            assert self.group[page] == group, f"page {page} holds group {self.group[page]}, not {group}"
            index += 1

    def write(self, row: int, numbers: list[int], start: int, count: int) -> set[int]:
        """Computes positions of a row, which reads all before them that they see. Returns the pages that it wrote."""
        size, end, written = self.page_size, start + count, set[int]()
        for group, table in enumerate(self.tables[row]):
            for index in range(start // size, -(-end // size)):
                assert table.first <= index < table.end, f"row {row} writes to index {index}, it has {table}"
                page = table.pages[index - table.first]
                assert self.users[page] == 1, f"page {page} of row {row} is written to while another row relies on it"
                written.add(page)
                first, last = max(start, index * size), min(end, (index + 1) * size)
                self.slots[page][first - index * size : last - index * size] = numbers[first:last]
                self.group[page] = group
            self.read(table, group, numbers, start, end)
            self._unuse(table.cut(first_seen(self.windows[group], end) // size))
        self.computed[row] = end
        return written

    def content(self) -> dict[int, list[int]]:
        """Pages by the last number of those that are full."""
        full = defaultdict(list)
        for page, slots in enumerate(self.slots):
            full[slots[-1]].append(page)
        return full
