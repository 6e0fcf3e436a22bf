"""A world with a host tier: pages go out and come back, and what comes back is now and then reported as spoilt."""

from random import Random
from unittest.mock import patch

from cache_manager import pool
from cache_manager.changes import PageChanges
from cache_manager.matching import NO_MATCH, Match
from cache_manager.prefix import NONE
from cache_manager.tier import HostTier
from tests.cache_manager.device import Table
from tests.cache_manager.driver import CacheDriver
from tests.cache_manager.histories import Flown, SequenceHistory
from tests.cache_manager.windows import first_needed

Birth = tuple[int, int]  # a page, and how often it had been given out


class TieredCacheDriver(CacheDriver):
    """spoils: how likely a step that brings copies reports one of them as spoilt. host: by slot, the content and group
    of the page that was copied there, and its birth. out, back: pages that were copied. spoilt: reported ones.
    """

    def __init__(self, slots: int, rng: Random, spoils: float = 0.0, **world: object) -> None:
        # Pools as small as these have no share to free ahead: half of the worlds have one.
        with patch.object(pool, "AHEAD_PART", (4, pool.AHEAD_PART)[slots % 2]):
            super().__init__(**world)  # type: ignore[arg-type]
        self.tier = self.manager.pool.tier = HostTier(slots, self.groups)
        self.manager.pool.swaps = True
        self.host: dict[int, tuple[list[int], int, Birth]] = {}
        self.out = self.back = self.spoilt = 0
        self._rng, self._spoils = rng, spoils
        self._lost: dict[int, list[int]] = {}  # by step
        self._match, self._due = NO_MATCH, set[int]()
        self._births = self.births.copy()  # as of the last plan
        self._origins: dict[Birth, Birth] = {}  # of pages that were copied back, the one that was copied out
        self._doubted: set[Birth] = set()
        self._execute = self.device.apply
        self.device.apply = self._swap_and_apply  # type: ignore[method-assign]

    # The device

    def _swap_and_apply(self, leaves: list[int], changes: PageChanges) -> None:
        device, outs, ins = self.device, changes.swap_outs().tolist(), changes.swap_ins().tolist()
        assert len({slot for _, slot in outs}) == len(outs), f"a slot is the target of two copies {outs}"
        assert len({page for _, page in ins}) == len(ins), f"a page is the target of two copies {ins}"
        for page, slot in outs:
            self.host[slot] = (device.slots[page].copy(), device.group[page], self._origin(page))
        self._execute(leaves, changes)
        self._births = self.births.copy()
        for slot, page in ins:
            content, group, origin = self.host[slot]
            device.slots[page], device.group[page] = content.copy(), group
            self._origins[page, self.births[page]] = origin
        if ins and self._rng.random() < self._spoils:
            self._lost[self.steps] = [self._rng.choice(ins)[1]]
        self.out, self.back = self.out + len(outs), self.back + len(ins)

    def _origin(self, page: int) -> Birth:
        birth = page, self._births[page]
        return self._origins.get(birth, birth)

    # Sequences

    def match(self, story: SequenceHistory) -> Match:
        if story.chain is None:
            return NO_MATCH
        self._name(story, story.known)
        self._match = match = self.manager.lookup.match(story.chain, story.known - 1)
        if not match.kept:
            return super().match(story)
        there = len(match.nodes)
        assert match.tokens == (there + len(match.kept)) * self.size < story.known
        in_part = match.tokens < story.scope.bidirectional and self.windows.any
        assert not in_part, "a span was hit in part, whose rest sees what is gone"
        slots = self.tier.slots_of(match.kept)
        for group, window in enumerate(self.windows.by_group):
            for index in range(first_needed(window, match.tokens, self.size), match.tokens // self.size):
                due = story.numbers[index * self.size : (index + 1) * self.size]
                if index < there:
                    page = int(self.manager.prefix.index.pages[group, match.nodes[index]])
                    have, where = self.device.slots[page], self.device.group[page]
                    assert page not in self.suspects | self.distrusted, "a page that is not trusted is handed out"
                else:
                    slot = int(slots[group, index - there])
                    assert slot != NONE, "a copy is needed that there is none of"
                    if slot in self._pending():
                        continue
                    have, where, origin = self.host[slot]
                    assert origin not in self._doubted, "a copy of a page that is not trusted is handed out"
                assert (have, where) == (due, group), f"{have} is there where a sequence needs {due}"
        return match

    def _pending(self) -> set[int]:
        """Slots that the next plan fills."""
        return set(self.manager.pool.changes.swap_outs()[:, 1].tolist())

    def longest(self, story: SequenceHistory) -> int:
        """Copies are looked at in `match`; without any, what is published is all."""
        return self._match.tokens if self._match.kept else super().longest(story)

    def tables_of(self, match: Match) -> list[Table]:
        pages = self.manager.prefix.index.pages
        firsts = [first_needed(window, match.tokens, self.size) for window in self.windows.by_group]
        return [Table(first, pages[g, match.nodes[first:]].tolist()) for g, first in enumerate(firsts)]

    def admit(self, story: SequenceHistory, wait: bool = True, everything: bool = True) -> bool:
        match = self.match(story)
        if not super().admit(story, wait, everything or bool(match.kept)):
            return False
        row = next(row for row in self.running() if self.story(row) is story)
        self.manager.fetch(row, match)
        # It holds nothing of what came before these copies, which may be gone before it can go on from there.
        story.unsure |= bool(match.kept) and None not in self.windows.by_group
        self._due.update(self.manager.pool.changes.swap_ins()[:, 1].tolist())
        return True

    def copied(self, row: int) -> bool:
        return super().copied(row) or not self._due.isdisjoint(self.story(row).pages)

    def _check_content(self, row: int, story: SequenceHistory) -> None:
        """Checks all content but that of pages which have yet to come back."""
        if self._due.isdisjoint(story.pages):
            super()._check_content(row, story)

    # Steps

    def _apply(self, flown: Flown) -> None:
        super()._apply(flown)
        self._due.clear()

    def commit(self, publish: bool = True, fault: int | None = None) -> bool:
        if not self.flight:
            return False
        step = self.flight[0].step
        lost = self._lost.pop(step, [])
        holders = [row for row in self.running() if not set(self.story(row).pages).isdisjoint(lost)]
        late = self.manager.arrived(step, lost)
        assert set(late) >= set(holders), "a row has pages whose copies were spoilt, and goes on"
        self.spoilt += len(lost)
        for row in late:
            self.release(row, again=True)
        return super().commit(publish, fault)

    # Trouble

    def distrust(self, row: int) -> None:
        story = self.story(row)
        had = self._had(story, -(-story.scheduled // self.size))
        super().distrust(row)
        self._doubted |= {self._origins.get(birth, birth) for birth in had}

    def reset(self) -> None:
        super().reset()
        assert not self.tier.copies, "a copy outlived a reset"

    def close(self) -> None:
        self._spoils = 0.0
        while self.flight:
            self.commit()
        super().close()

    def check(self) -> None:
        super().check()
        used = sum(slot != NONE for copy in self.tier.copies.values() for slot in copy.slots)
        assert used == self.tier.used <= self.tier.slots
