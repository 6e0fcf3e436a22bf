"""The cache manager beside a plain model of it, driven like a scheduler drives it: steps, and what goes wrong.

`check` compares all that both know, and asks what must hold at every moment.
"""

import numpy as np

from cache_manager.ledger import LedgerError, explain, imbalances
from cache_manager.prefix import NONE
from tests.cache_manager.device import NOTHING
from tests.cache_manager.sequences import Flown, Sequences, Story

MOST_IN_FLIGHT = 2


class World(Sequences):
    """Steps are executed when they are launched and known when they are committed, as on a device that is slower than
    its host.
    """

    # Steps

    def covers(self, rows: list[int], ends: list[int]) -> list[bool]:
        """Which rows can write up to their ends without `grow`."""
        answers = self.manager.covers(np.array(rows, np.int32), np.array(ends, np.int32)).tolist()
        for row, end, covered in zip(rows, ends, answers, strict=True):
            table = self.story(row).table
            due = len(table[0]) * self.size >= end and not self.story(row).forked
            assert covered == due, f"covers said {covered} of row {row}, which holds {table[0]}, up to {end}"
        return answers

    def lacking(self) -> list[int]:
        """Rows that share nothing and need one more page to go on."""
        rows = [row for row in self.running() if self.story(row).need > 0]
        full = [row for row in rows if self.story(row).scheduled == len(self.story(row).table[0]) * self.size]
        return [row for row in full if not self.manager.forked[row]]

    def launch(self, work: list[tuple[int, int]], draw: int = 0) -> bool:
        """Plans and executes a step: row and count of each slice; rows that lack pages sit out. draw: the token of each
        sequence whose last one is computed.
        """
        if len(self.flight) >= MOST_IN_FLIGHT:
            return False
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
            story.scheduled += count
            end = -(-story.scheduled // self.size)
            flown.touched.update(page for table in story.table for page in table[:end])
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
        self.manager.begin(self.steps, self.steps)
        return True

    def _apply(self, flown: Flown) -> None:
        """Tells the device what has changed since the last plan."""
        changes = self.manager.take_changes()
        freed, copies = changes.freed_pages().tolist(), changes.copies()
        node_of = self.manager.prefix.index.node_of
        for page in freed:
            assert node_of[page] == NONE, f"page {page} was told to be freed, it is cached"
            assert not any(page in f.touched for f in self.flight), f"page {page} was freed while a step touches it"
        due = {(source, target) for target, source in self.targets.items()}
        assert set(map(tuple, copies.tolist())) == due, f"the plan copies {copies.tolist()}, it must copy {due}"
        self.device.apply(self.leaves, changes)
        flown.touched.update(copies.reshape(-1).tolist())
        flown.written.update(copies[:, 1].tolist())
        self.leaves, self.sources, self.targets = [], {}, {}
        for row in self.running():
            assert self.device.tables[row] == self.story(row).table, f"the device has another table of row {row}"

    def commit(self, publish: bool = True, fault: int | None = None) -> bool:
        """Takes in the oldest step. fault: this slice of it went wrong, and its sequence ends."""
        if not self.flight:
            return False
        flown = self.flight.popleft()
        self.retired = flown.step
        self.manager.retire(flown.step)
        for _, pages in [w for w in self.waiting if w[0] <= flown.step]:
            self._drop(pages)
        self.waiting = [w for w in self.waiting if w[0] > flown.step]
        for i, (row, serial, computed) in enumerate(flown.work):
            story = self.rows[row]
            if story is None or story.serial != serial:
                continue
            if i == fault:
                self.distrust(row)
                self.release(row)
            elif publish:
                self.publish(row, computed)
        known = {story.serial: story for story in self.rows if story is not None}
        for serial in flown.draws:
            if serial in known:
                known[serial].known += 1
        self._balance()
        return True

    def publish(self, row: int, computed: int) -> None:
        story, size = self.story(row), self.size
        done = 0 if story.chain is None else len(story.chain.names) * size
        if story.chain is not None and computed - done >= size:
            story.chain.extend(np.array(story.tokens[done:computed], np.int32))
        named = len(self.manager.prefix.index)
        self.manager.publish(row, computed, self.after(story))
        assert not story.silent or len(self.manager.prefix.index) == named, f"row {row} was to publish no more"
        now = self._table(row)
        for group, (before, table) in enumerate(zip(story.table, now, strict=True)):
            assert len(before) == len(table)
            changed = [i for i, page in enumerate(table) if page != before[i]]
            gone, new = [before[i] for i in changed], [table[i] for i in changed]
            assert not self.suspects.intersection(new), "a page that was set aside is handed out"
            assert all(self.counts[page] == 1 for page in gone), "a page that a fork shares was given up"
            for i in changed:
                assert (i + 1) * size <= computed, "a page that is not computed was replaced"
                self.device.read([table[i]], group, story.numbers[i * size :], size)
            if new:
                self._hold(new)
                self._let_go(gone, self.after(story))
        story.table = now
        self._balance()

    # Trouble

    def distrust(self, row: int) -> None:
        story = self.story(row)
        self.manager.distrust(row)
        for other in map(self.story, self.running()):  # itself, and its forks
            other.silent |= not set(story.table[0]).isdisjoint(other.table[0])
        written = -(-story.scheduled // self.size)
        self.distrusted.update(page for table in story.table for page in table[:written])
        self._balance()

    def reset(self) -> None:
        self.manager.reset()
        assert len(self.manager.prefix.index) == 0, "a name outlived a reset"
        for story in self.rows:
            if story is not None:
                story.silent = True
        self._balance()

    def shrink_cache(self, pages: int) -> None:
        before = self.manager.prefix.cached
        self.manager.shrink_cache(pages)
        cached = self.manager.prefix.cached
        assert min(before, pages) - self.groups < cached <= pages or cached == before <= pages
        self._balance()

    def quarantine(self, pages: list[int]) -> None:
        self.manager.quarantine(np.array(pages, np.int32), np.array([self.counts[page] for page in pages]))
        self.suspects.update(pages)
        self._balance()

    # What must hold

    def check(self) -> None:
        """All that both know, and what must hold at every moment."""
        wrong = [i for i in imbalances(self.manager) if i.page not in self.suspects]
        if wrong:
            raise LedgerError(explain(wrong))
        manager = self.manager
        assert manager.allocator.counts.tolist() == self.counts
        assert set(manager.allocator.suspects) == self.suspects
        assert manager.returning == sum(len(pages) for _, pages in self.waiting)
        for row, story in enumerate(self.rows):
            assert self._table(row) == (story.table if story else [[]] * self.groups)
            if story is not None:
                self._check_content(row, story)
        self._check_names()
        if not self.running():
            assert not any(map(manager.is_computing, self.awaited)), "a page that nobody computes is waited for"
        for story in self.queue:
            match = self.match(story)
            if story.chain is not None and not self.collisions:
                assert match.tokens == self.longest(story), "what is published was not found"

    def _check_content(self, row: int, story: Story) -> None:
        """The row's pages, as the device knows them, hold all that was computed; those it will be told of, too."""
        for group, table in enumerate(self.device.tables[row] if row not in self.leaves else []):
            self.device.read(table, group, story.numbers, min(story.scheduled, len(table) * self.size))

    def _check_names(self) -> None:
        """Every page with a name holds what comes after the page before it, and is neither written nor doubted."""
        index, device, before = self.manager.prefix.index, self.device, self.prefixes.before
        doubted = self.suspects | self.distrusted
        for flown in self.flight:
            doubted |= flown.written
        for node in index.all():
            parent = index.parent[node]
            for group, page in enumerate(index.pages[:, node].tolist()):
                slots = device.slots[page]
                assert page not in doubted, f"page {page} has a name and is being written to, doubted or set aside"
                assert NOTHING not in slots, f"page {page} has a name and was not computed: {slots}"
                assert device.group[page] == group, f"page {page} stands in group {group}, was written in another"
                chained = [before[number] for number in slots]
                assert chained[1:] == slots[:-1], f"page {page} holds {slots}, which is no sequence"
                if parent == NONE:
                    assert before[chained[0]] == NOTHING, f"page {page} is named as a first page, and is not one"
                else:
                    due = device.slots[index.pages[group, parent]][-1]
                    assert chained[0] == due, f"page {page} does not go on from the page before it"

    def check_freed(self) -> None:
        """After a launch: whatever is free was told to be, or never had been used."""
        for page in self.manager.allocator.free_pages().tolist():
            assert set(self.device.slots[page]) == {NOTHING}, f"page {page} is free, nobody was told"

    def close(self) -> None:
        """Ends everything: all pages are free or cached, and nobody waits for a page that nobody computes."""
        for ends in ([], self.running()):
            while self.commit():
                pass
            for row in ends:
                self.release(row)
            self.launch([])
        self.check_freed()
        while self.commit():
            pass
        free = self.manager.total - len(self.suspects)
        assert self.manager.free == free, f"{free - self.manager.free} pages were lost"
        assert (self.manager.returning, self.held) == (0, 0)
        self.check()
