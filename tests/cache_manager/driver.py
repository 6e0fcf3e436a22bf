"""The cache manager beside a plain model of it, driven like a scheduler drives it: steps, and what goes wrong.

`check` compares all that both know, and asks what must hold at every moment.
"""

import numpy as np

from cache_manager.ledger import LedgerError, explain, imbalances
from cache_manager.prefix import NONE
from tests.cache_manager.device import NOTHING, Table
from tests.cache_manager.histories import Flown, SequenceHistory, tables
from tests.cache_manager.sequences import Sequences
from tests.cache_manager.windows import first_seen

MOST_IN_FLIGHT = 2


class CacheDriver(Sequences):
    """Steps are executed when they are launched and known when they are committed, as on a device that is slower than
    its host.
    """

    # Steps

    def covers(self, rows: list[int], ends: list[int]) -> list[bool]:
        """Returns which rows can write up to their ends without `grow`."""
        answers = self.manager.covers(np.array(rows, np.int32), np.array(ends, np.int32)).tolist()
        for row, end, covered in zip(rows, ends, answers, strict=True):
            story = self.story(row)
            due = story.slots * self.size >= end and not story.forked
            assert covered == due, f"covers said {covered} of row {row}, which holds {story.table}, up to {end}"
        return answers

    def lacking(self) -> list[int]:
        """Rows that share nothing and need one more page in every group to go on."""
        return [
            row
            for row in self.running()
            if (story := self.story(row)).need > 0
            and not story.forked
            and all(table.end * self.size == story.scheduled for table in story.table)
        ]

    def launch(self, work: list[tuple[int, int]], draw: int = 0) -> bool:
        """Plans and executes a step: row and count of each slice, no more than may be in flight; rows that lack pages
        sit out. draw: the token of each sequence whose last one is computed.
        """
        if len(self.flight) >= MOST_IN_FLIGHT:
            return False
        work = [(row, min(count, self.need(row))) for row, count in work]
        ends = [self.story(row).scheduled + count for row, count in work]
        covered = self.covers([row for row, _ in work], ends)
        going = [
            (row, count)
            for (row, count), end, ready in zip(work, ends, covered, strict=True)
            if count > 0 and (ready or self.grow(row, end))
        ]
        flown = Flown(self.steps, [], [], set(), set())
        for row in self.running():
            if self.copied(row):
                self.story(row).last_step = flown.step
        self._apply(flown)
        for row, count in going:
            story = self.story(row)
            story.last_step = flown.step
            flown.written |= self.device.write(row, story.numbers, story.scheduled, count)
            flown.touched |= self._touched(story, story.scheduled + count)
            story.scheduled += count
            flown.work.append((row, story.serial, story.scheduled))
            if story.scheduled == len(story.tokens) < story.goal:
                story.tokens.append(draw)
                self.prefixes.extend(story.numbers, story.tokens, story.scope, self.size)
                flown.draws.append(story.serial)
        flown.touched |= flown.written
        node_of = self.manager.prefix.index.node_of
        assert all(node_of[page] == NONE for page in flown.written), "a page is written to while it has a name"
        self.flight.append(flown)
        self.steps += 1
        self.manager.pool.begin(self.steps, self.steps)
        return True

    def _touched(self, story: SequenceHistory, end: int) -> set[int]:
        """Pages that a step reads or writes which computes up to there."""
        touched = set[int]()
        for table, window in zip(story.table, self.windows.by_group, strict=True):
            touched.update(table.between(first_seen(window, story.scheduled) // self.size, -(-end // self.size)))
        return touched

    def _apply(self, flown: Flown) -> None:
        """Tells the device what has changed since the last plan."""
        changes = self.manager.pool.take_changes()
        freed, copies = changes.freed_pages().tolist(), changes.copies()
        node_of = self.manager.prefix.index.node_of
        for page in freed:
            assert node_of[page] == NONE, f"page {page} was told to be freed, it is cached"
            assert not any(page in f.touched for f in self.flight), f"page {page} was freed while a step touches it"
        self._check_copies(flown.step, {target: source for source, target in copies.tolist()})
        self.device.apply(self.leaves, changes)
        flown.touched.update(copies.reshape(-1).tolist())
        flown.written.update(copies[:, 1].tolist())
        self.leaves, self.sources, self.targets = [], {}, {}
        for row in self.running():
            pairs = zip(self.device.tables[row], self.story(row).table, strict=True)
            same = all(told.pages == table.between(told.first, table.end) for told, table in pairs)
            assert same, f"the device has another table of row {row}"

    def _check_copies(self, step: int, copies: dict[int, int]) -> None:
        """Checks that copied pages are held by rows, or wait for the step that copies to them or a later one."""
        held = {page for row in self.running() for page in self.story(row).pages}
        late = {page for after, pages in self.waiting if after >= step for page in pages}
        must = {target: source for target, source in self.targets.items() if target in held}
        may = {target: source for target, source in self.targets.items() if target in held | late}
        assert must.items() <= copies.items() <= may.items(), f"{copies} are copied, at least {must}, at most {may} due"

    def commit(self, publish: bool = True, fault: int | None = None) -> bool:
        """Takes in the oldest step. fault: this slice of it went wrong, and its sequence ends."""
        if not self.flight:
            return False
        flown = self.flight.popleft()
        self.retired = flown.step
        self.manager.pool.retire(flown.step)
        for _, pages in [w for w in self.waiting if w[0] <= flown.step]:
            self._drop(pages)
        self.waiting = [w for w in self.waiting if w[0] > flown.step]
        for i, (row, serial, computed) in enumerate(flown.work):
            story = self.rows[row]
            if story is None or story.serial != serial:
                continue
            story.computed = computed
            if i == fault:
                self.distrust(row)
                self.release(row)
            elif publish:
                self.publish(row, computed)
        if publish:
            same = [work for work in flown.work if (story := self.rows[work[0]]) and story.serial == work[1]]
            self.slide([row for row, _, _ in same], [computed for _, _, computed in same])
        known = {story.serial: story for story in self.rows if story is not None}
        for serial in flown.draws:
            if serial in known:
                known[serial].known += 1
        self._balance()
        return True

    def publish(self, row: int, computed: int) -> None:
        story = self.story(row)
        self._name(story, computed)
        named, names = len(self.manager.prefix.index), self.manager.published
        full, latest = computed // self.size, self.flight[-1].step if self.flight else None
        if full <= names.count[row] or names.publish_next(*np.array([[row], [full]], np.int32)):
            names.publish(row, computed, latest)
        assert not story.silent or len(self.manager.prefix.index) == named, f"row {row} was to publish no more"
        gone = self._exchange(row, computed, latest)
        for other in self.running() if gone else ():
            if other != row:
                self._exchange(other, computed, latest)
            kept = gone.intersection(self.story(other).pages)
            assert not kept, f"row {row} gives up pages {kept}, row {other} holds them, and what comes after them"
        self._balance()
        if full > story.published and (story.silent or names.count[row] >= full):
            story.published = full
            self._come_to_next(story)
            self._check_published(story, story.published * self.size)

    def _exchange(self, row: int, computed: int, latest: int | None) -> set[int]:
        """Follows what was taken over in a row's table. Returns pages that it has given up."""
        story, now, gone = self.story(row), tables(self.manager, row), set[int]()
        for group, (before, after) in enumerate(zip(story.table, now, strict=True)):
            assert (before.first, before.end) == (after.first, after.end)
            pairs = enumerate(zip(before.pages, after.pages, strict=True), before.first)
            changed = [(index, *pair) for index, pair in pairs if pair[0] != pair[1]]
            self._replace(story, group, computed, changed, latest)
            gone.update(before for _, before, _ in changed)
        story.table = now
        return gone

    def _replace(
        self, story: SequenceHistory, group: int, computed: int, changed: list[tuple[int, int, int]], latest: int | None
    ) -> None:
        """changed: index, page given up and page of the same content that was taken over. latest: step in flight."""
        gone, new = [before for _, before, _ in changed], [after for _, _, after in changed]
        assert not self.suspects.intersection(new), "a page that was set aside is handed out"
        for index, _, page in changed:
            end = (index + 1) * self.size
            assert end <= computed, "a page that is not computed was replaced"
            due = story.numbers[end - self.size : end]
            assert self.device.slots[page] == due, f"page {page} was taken over, it does not hold {due}"
            assert self.device.group[page] == group, f"page {page} of another group was taken over"
        if new:
            self._hold(new)
            self._let_go(gone, latest)

    def _check_published(self, story: SequenceHistory, tokens: int) -> None:
        """Checks that all that a row has just published is found."""
        if story.chain is None or story.silent or story.unsure or self.collisions or tokens < story.scope.bidirectional:
            return
        found = self.manager.lookup.match(story.chain, tokens).tokens
        assert found == tokens, f"of {tokens} tokens that were computed and published, {found} are found"

    # Trouble

    def distrust(self, row: int) -> None:
        story = self.story(row)
        self.manager.published.distrust(row)
        had = self._had(story, story.slots)
        for other in map(self.story, self.running()):  # itself, its forks, and who has read what it had
            other.silent |= not had.isdisjoint(self._had(other, other.slots))
            other.unsure = True
        written = self._had(story, -(-story.scheduled // self.size))
        self.distrusted.update(page for page, birth in written if birth == self.births[page])
        self._leave_line()
        self._balance()

    def _had(self, story: SequenceHistory, end: int) -> set[tuple[int, int]]:
        """Pages up to this index that it holds, or held before they left a window; each with its birth."""
        now = [page for table in story.table for page in table.between(0, end)]
        return story.past | {(page, self.births[page]) for page in now}

    def reset(self) -> None:
        self.manager.published.reset()
        assert len(self.manager.prefix.index) == 0, "a name outlived a reset"
        for story in self.rows:
            if story is not None:
                story.silent = True
        self._leave_line()
        self._balance()

    def shrink_cache(self, pages: int) -> None:
        before = self.manager.prefix.cached
        with self._evicting():
            self.manager.pool.shrink_cache(pages)
        cached = self.manager.prefix.cached
        assert min(before, pages) - self.groups < cached <= pages or cached == before <= pages
        self._balance()

    def quarantine(self, pages: list[int]) -> None:
        self.manager.pool.quarantine(np.array(pages, np.int32), np.array([self.counts[page] for page in pages]))
        self.suspects.update(pages)
        for row in self.running():
            self.story(row).unsure = True
        self._leave_line()
        self._balance()

    # Laws

    def check(self) -> None:
        """All that both know, and what must hold at every moment."""
        wrong = [i for i in imbalances(self.manager) if i.page not in self.suspects]
        if wrong:
            raise LedgerError(explain(wrong))
        manager = self.manager
        assert manager.allocator.counts.tolist() == self.counts
        assert set(manager.allocator.pages_set_aside) == self.suspects
        assert manager.pool.returning == sum(len(pages) for _, pages in self.waiting)
        for row, story in enumerate(self.rows):
            assert tables(manager, row) == (story.table if story else [Table()] * self.groups)
            if story is not None:
                self._check_content(row, story)
        assert set(manager.prefix.slid) == set(self.line), "other pages left a window than are first in line"
        self._check_slots()
        self._check_promised()
        self._check_names()
        if not self.running():
            assert not any(map(manager.published.is_computing, self.awaited)), (
                "a page that no row computes is waited for"
            )
        for story in self.queue:
            match = self.match(story)
            if story.chain is not None and not self.collisions:
                assert match.tokens == self.longest(story), "what is published was not found"

    def _check_content(self, row: int, story: SequenceHistory) -> None:
        """The row's pages, as the device knows them, hold what comes next sees; those it will be told of, too."""
        for group, table in enumerate(self.device.tables[row] if row not in self.leaves else []):
            end = min(story.scheduled, table.end * self.size)
            self.device.read(table, group, story.numbers, story.scheduled, end)

    def _check_slots(self) -> None:
        rows = self.running()
        unused = self.manager.slots_unused(sum(self.story(row).scheduled for row in rows))
        ends = [table.end * self.size - self.story(row).scheduled for row in rows for table in self.story(row).table]
        assert unused == sum(ends), f"{unused} slots are said to be unused, {sum(ends)} are"

    def _check_names(self) -> None:
        """Every page with a name holds what comes after the page before it, and is neither written nor doubted."""
        index, numbers = self.manager.prefix.index, dict[int, int]()
        doubted = self.suspects | self.distrusted
        for flown in self.flight:
            doubted |= flown.written
        nodes = index.all()
        for node in nodes:
            for group, page in enumerate(index.pages[:, node].tolist()):
                if page == NONE:
                    assert self.windows.by_group[group] is not None, "a page without a window is gone before its node"
                    continue
                assert page not in doubted, f"page {page} has a name and is being written to, doubted or set aside"
                self._check_page(page, group)
                number = self.device.slots[page][-1]
                assert numbers.setdefault(node, number) == number, f"node {node} has pages of two contents"
        for node in list(numbers):
            self._check_path(node, numbers)
        assert len(numbers) == len(nodes), "a node has no pages, and none that comes after it has"

    def _check_page(self, page: int, group: int) -> None:
        slots, before = self.device.slots[page], self.prefixes.before
        assert NOTHING not in slots, f"page {page} has a name and was not computed: {slots}"
        assert self.device.group[page] == group, f"page {page} stands in group {group}, was written in another"
        assert [before[number] for number in slots[1:]] == slots[:-1], (
            f"page {page} holds {slots}, which is no sequence"
        )

    def _check_path(self, node: int, numbers: dict[int, int]) -> None:
        """numbers: by node, the last one in its pages. Those of nodes that have lost their pages are added."""
        parent, index = self.prefixes.shorter(numbers[node], self.size), self.manager.prefix.index
        while (before := index.parent[node]) != NONE:
            known = before in numbers
            assert numbers.setdefault(before, parent) == parent, f"node {node} does not go on from the one before it"
            if known:
                return
            node, parent = before, self.prefixes.shorter(parent, self.size)
        assert self.prefixes.before[parent] == NOTHING, f"node {node} is named as a first page, and is not one"

    def check_freed(self) -> None:
        """After a launch: whatever is free was told to be, or never had been used."""
        for page in self.manager.allocator.free_pages().tolist():
            assert set(self.device.slots[page]) == {NOTHING}, f"page {page} is free, no plan has said so"

    def close(self) -> None:
        """Ends everything: all pages are free or cached, and no sequence waits for a page that no row computes."""
        for ends in ([], self.running()):
            while self.commit():
                pass
            for row in ends:
                self.release(row)
            self.launch([])
        self.check_freed()
        while self.commit():
            pass
        free = self.manager.pool.total - len(self.suspects)
        assert self.manager.pool.free == free, f"{free - self.manager.pool.free} pages were lost"
        assert (self.manager.pool.returning, self.held) == (0, 0)
        self.check()
        self.shrink_cache(0)
        self.check()
        prefix = self.manager.prefix
        assert len(prefix.index) == len(prefix.policy) == 0, "pages without a holder could not be given up"
