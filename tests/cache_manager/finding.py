"""The cached prefix of a sequence: the manager's, beside a search through all that the device holds."""

import numpy as np

from cache_manager.block_hash import HashChain
from cache_manager.matching import NO_MATCH, Awaited, Match
from cache_manager.prefix import NONE
from tests.cache_manager.device import Device, Table
from tests.cache_manager.histories import SequenceHistory
from tests.cache_manager.sliding import Sliding
from tests.cache_manager.windows import first_needed, most_held


class Finding(Sliding):
    """collisions: two contents may have one name, so that what was published cannot always be found. awaited: all that
    requests were told to wait for.
    """

    device: Device
    collisions: bool
    awaited: set[Awaited]

    def match(self, story: SequenceHistory) -> Match:
        """Returns the cached prefix of a queued sequence, after looking through it."""
        chain, most = story.chain, story.known - 1
        if chain is None:
            return NO_MATCH
        self._name(story, story.known)
        match = self.manager.lookup.match(chain, most)
        assert match.tokens == len(match.nodes) * self.size
        assert match.tokens <= most, f"{match.tokens} tokens were matched, at most {most} were asked for"
        in_part = match.tokens < story.scope.bidirectional and self.windows.any
        assert not match.tokens or not in_part, "a span was hit in part, whose rest sees what is gone"
        for group, table in enumerate(self.tables_of(match)):
            self.device.read(table, group, story.numbers, match.tokens, match.tokens)
            assert not self.suspects.intersection(table.pages), "a page that was set aside is handed out"
            assert not self.distrusted.intersection(table.pages), "a page that is not trusted is handed out"
            for flown in self.flight:
                assert not flown.written.intersection(table.pages), "a page is handed out while a step writes it"
        if match.awaited is not None:
            self._check_awaited(match.awaited, chain, len(match.nodes))
        elif not self.collisions and not story.scope.bidirectional and match.tokens + self.size <= most:
            for other in self._at(story, match.tokens):
                sure = not (other.rivalled or other.silent or other.unsure)
                assert not sure, f"attempt {other.attempt} computes the next page, and the request does not wait for it"
        return match

    def _come_to_next(self, story: SequenceHistory) -> None:
        """A running sequence computes its next page from now on. The first one to come to a page is waited for."""
        rivals = self._at(story, story.published * self.size)
        story.rivalled = False
        for other in rivals if len(rivals) > 1 else ():
            other.rivalled = True

    def _at(self, story: SequenceHistory, tokens: int) -> list[SequenceHistory]:
        """Running sequences that compute the page after these tokens of a sequence, and know its block hash."""
        end = tokens + self.size
        return [
            other
            for other in self.rows
            if other is not None
            and other.published * self.size == tokens
            and other.chain is not None
            and len(other.chain.hashes) * self.size >= end
            and other.numbers[tokens:end] == story.numbers[tokens:end]
        ]

    def _name(self, story: SequenceHistory, end: int) -> None:
        """Extends the names of its pages to what is known up to there."""
        done = 0 if story.chain is None else len(story.chain.hashes) * self.size
        if story.chain is not None and end - done >= self.size:
            story.chain.extend(np.array(story.tokens[done:end], np.int32))

    def tables_of(self, match: Match) -> list[Table]:
        """Returns by group the pages that a sequence going on from there holds: those it sees, and one to go on."""
        pages = self.manager.prefix.index.pages
        windows = self.windows.by_group
        firsts = tuple(first_needed(window, match.tokens, self.size) for window in windows)
        due = firsts if self.windows.any and match is not NO_MATCH else ()
        assert match.firsts == due, f"pages from {match.firsts} on are used, not {firsts}"
        return [Table(first, pages[g, match.nodes[first:]].tolist()) for g, first in enumerate(firsts)]

    def longest(self, story: SequenceHistory) -> int:
        """Tokens of the longest prefix that is published and has what the next token sees, by looking at every page."""
        full, node_of = self.device.content(), self.manager.prefix.index.node_of
        ends = range(self.size, story.known, self.size)
        here = [
            {self.device.group[page] for page in full.get(story.numbers[end - 1], ()) if node_of[page] != NONE}
            for end in ends
        ]
        valid = [
            end
            for end in ends
            if (end >= story.scope.bidirectional or not self.windows.any)
            and all(
                group in here[index]
                for group, window in enumerate(self.windows.by_group)
                for index in range(first_needed(window, end, self.size), end // self.size)
            )
        ]
        return max(valid, default=0)

    def _check_awaited(self, awaited: Awaited, chain: HashChain, known: int) -> None:
        """A row computes it, and it is the prompt's."""
        story, end = self.rows[awaited.row], awaited.index + 1
        assert story is not None, "no row computes the page that a request waits for"
        assert not story.silent, "what is waited for will not be published"
        if not self.collisions:
            assert self.manager.published.is_computing(awaited), "it was computed, and is waited for"
            assert known < end, "what is waited for is here"
            assert story.chain is not None
            assert story.chain.hashes[:end] == chain.hashes[:end], "a request waits for what it does not need"
        self.awaited.add(awaited)

    def needed(self, match: Match, story: SequenceHistory) -> int:
        """Pages that the sequence takes out of the free ones at most: exactly, without windows; with a window no less
        than comes to pass, and no more than a page beyond what it holds then.
        """
        needed, end = self.manager.needed(match, story.known), story.known
        least = most = 0
        for table, window in zip(self.tables_of(match), self.windows.by_group, strict=True):
            others = frozenset(table.first + i for i, page in enumerate(table.pages) if self.counts[page])
            if window is None:
                need = -(-end // self.size) - len(others)
                least, most = least + need, most + need
            else:
                held = (window, self.size, self.windows.ahead, table.first, table.end, match.tokens, end)
                least, most = least + most_held(*held, others), most + most_held(*held) + 1
        assert least <= needed <= most, f"{needed} pages are needed, {least} to {most} was due"
        return needed
