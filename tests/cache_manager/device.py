"""A device that remembers, instead of keys and values, which prefix every slot of every page was computed from.

Two slots may stand for each other exactly where their numbers are equal: a number stands for all that the KV of a
position depends on (all tokens so far, images, spans that hit whole) and for who may see it (tenant, salt, public).
"""

from collections import defaultdict

from cache_manager.changes import PageChanges
from cache_manager.page_names import Scope

NOTHING = 0  # in a slot: nobody may read this


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

    def extend(self, numbers: list[int], tokens: list[int], scope: Scope, page_size: int) -> None:
        """Adds to `numbers` those of the positions up to the end of `tokens`."""
        public = 0 if scope.salt or scope.whole else scope.public // page_size
        if numbers:
            number = numbers[-1]
        else:
            number = self.after(NOTHING, (tuple(tokens[: scope.whole]), scope.images) if scope.whole else "causal")
        for position in range(len(numbers), len(tokens)):
            audience = "all" if position // page_size < public else (scope.tenant, scope.salt)
            seen = tuple(image for image in scope.images if image.start <= position < image.end)
            number = self.after(number, (tokens[position], audience, seen))
            numbers.append(number)


class Device:
    """Executes plans in order, at once. slots: [pages][page_size] numbers. group: [pages] of the last write. tables:
    [rows][groups] pages, as told. users: [pages] in how many tables each stands.
    """

    def __init__(self, groups: int, pages: int, page_size: int, rows: int) -> None:
        self.page_size, self.groups = page_size, groups
        self.slots = [[NOTHING] * page_size for _ in range(pages)]
        self.group = [NOTHING] * pages
        self.tables: list[list[list[int]]] = [[[] for _ in range(groups)] for _ in range(rows)]
        self.users = [0] * pages

    def apply(self, leaves: list[int], changes: PageChanges) -> None:
        """What comes before a step computes, in the order of a step plan; pages that were freed lose their content."""
        for page in changes.freed_pages().tolist():
            self.slots[page] = [NOTHING] * self.page_size
        for row in leaves:
            for table in self.tables[row]:
                for page in table:
                    self.users[page] -= 1
                table.clear()
        for group, row, index, page in changes.grown().tolist():
            table = self.tables[row][group]
            if index < len(table):
                self.users[table[index]] -= 1
                table[index] = page
            else:
                assert index == len(table), f"row {row} was told page {page} at index {index}, it has {len(table)}"
                table.append(page)
            self.users[page] += 1
        copies = changes.copies().tolist()
        if copies:
            sources, targets = {source for source, _ in copies}, [target for _, target in copies]
            assert not sources.intersection(targets), f"a page is source and target of copies {copies}"
            assert len(set(targets)) == len(targets), f"a page is the target of two copies {copies}"
            for source, target in copies:
                self.slots[target] = self.slots[source].copy()
                self.group[target] = self.group[source]

    def read(self, table: list[int], group: int, numbers: list[int], end: int) -> None:
        """The pages of this table, which belongs to a group, must hold positions below `end` of a sequence."""
        size, slots = self.page_size, self.slots
        for index in range(-(-end // size)):
            start, page = index * size, table[index]
            count = min(size, end - start)
            have, due = slots[page][:count], numbers[start : start + count]
            assert have == due, f"page {page} holds {have} where a sequence needs {due}"
            assert self.group[page] == group, f"page {page} holds group {self.group[page]}, not {group}"

    def write(self, row: int, numbers: list[int], start: int, count: int) -> set[int]:
        """Computes positions of a row, which reads all before them. Returns the pages that it wrote."""
        size, written = self.page_size, set[int]()
        for group, table in enumerate(self.tables[row]):
            for index in range(start // size, -(-(start + count) // size)):
                page = table[index]
                assert self.users[page] == 1, f"page {page} of row {row} is written to while another row relies on it"
                written.add(page)
                first, last = max(start, index * size), min(start + count, (index + 1) * size)
                self.slots[page][first - index * size : last - index * size] = numbers[first:last]
                self.group[page] = group
            self.read(table, group, numbers, start + count)
        return written

    def content(self) -> dict[int, list[int]]:
        """Pages by the last number of those that are full."""
        full = defaultdict(list)
        for page, slots in enumerate(self.slots):
            full[slots[-1]].append(page)
        return full
