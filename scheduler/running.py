"""Who has a row and its pages, who waits for one, and what the executor is to be told of it with the next plan."""

from dataclasses import replace
from itertools import chain

import numpy as np

from cache_manager.manager import CacheManager
from cache_manager.matching import Match
from cache_manager.prefix import NONE
from scheduler.attempts import Attempts
from scheduler.beam import BeamSearch
from scheduler.events import EndReason
from scheduler.queue import Queue
from scheduler.rows import Rows, Sequence
from scheduler.step import Fill, Ints, Join
from scheduler.tally import Tally


class Running:
    """beams: the search of each attempt that is one. retired: the last step that has run. joins, leaves, given: what
    the next plan tells.
    """

    def __init__(self, size: int, cache: CacheManager, tally: Tally) -> None:
        self.rows, self.queue, self.attempts = Rows(size), Queue(), Attempts()
        self.beams: dict[int, BeamSearch] = {}
        self.retired = -1
        self.joins: list[Join] = []
        self.leaves: list[int] = []
        self.given: dict[int, int] = {}
        self._cache, self._tally = cache, tally

    def take_given(self) -> Ints:
        """[n, 2] as in the plan."""
        given, self.given = self.given, {}
        return np.array(list(given.items()), np.int32).reshape(-1, 2)

    def start(self, sequence: Sequence, match: Match) -> int:
        """Takes the sequence out of the queue and gives it a row, with pages for all its tokens, of which the match has
        the first ones.
        """
        self.queue.remove(*sequence.key)
        row = self.rows.add(sequence)
        self._cache.open(row, sequence.attempt, sequence.chain, match)
        self._cache.grow(row, match.tokens, sequence.length)
        self._cache.fetch(row, match)
        self.rows.scheduled[row] = match.tokens
        self._join(row, sequence, self._fill(row, sequence, match))
        sequence.brought = {}
        return row

    def _fill(self, row: int, sequence: Sequence, match: Match) -> Fill | None:
        """What it has come with, for the pages that it was given for that."""
        if not match.brought:
            return None
        pages = self._cache.to_fill(row, match)
        groups, which = np.nonzero(pages != NONE)
        content = [sequence.brought[match.brought[i]][g] for g, i in zip(groups.tolist(), which.tolist(), strict=True)]
        self._tally.brought += len(content)
        return Fill(pages[groups, which], np.stack(content))

    def fork(self, row: int, sequence: Sequence) -> int:
        """Gives a sequence that goes on from this row's a row that shares its pages."""
        child = self.rows.add(sequence)
        self.rows.scheduled[child], self.rows.last_step[child] = self.rows.scheduled[row], self.rows.last_step[row]
        sequence.chain = self._cache.fork(row, child, sequence.attempt)
        self._join(child, sequence)
        return child

    def _join(self, row: int, sequence: Sequence, fill: Fill | None = None) -> None:
        request = sequence.request
        self.joins.append(
            Join(
                row,
                sequence.tokens(),
                len(request.prompt),
                request.drawing,
                sequence.index,
                request.images,
                request.scope.whole,
                fill,
            )
        )

    def preempt(self, row: int) -> None:
        """The sequence waits for another row; a hypothesis that needs none now is kept by its search."""
        sequence = self.rows.sequence(row)
        sequence.preempted = True
        sequence.lost = max(sequence.lost, int(self.rows.scheduled[row]))
        self._tally.preemptions += 1
        self.drop(row)
        search = self.beams.get(sequence.attempt)
        if search is not None and search.has_offer(sequence.index):
            search.parked[sequence.index] = sequence
        else:
            self.queue.push(sequence)

    def drop(self, row: int) -> None:
        last = int(self.rows.last_step[row])
        self.rows.remove(row)
        self._cache.release(row, last if last > self.retired else None)
        self.given.pop(row, None)
        untold = [join for join in self.joins if join.row == row]
        if untold:
            self.joins.remove(untold[0])
        else:
            self.leaves.append(row)

    def leave(self, attempt: int, index: int) -> None:
        """The sequence leaves its row or the queue."""
        row = self.rows.row_of(attempt, index)
        if row is not None:
            self.drop(row)
        else:
            self.queue.remove(attempt, index)

    def finish(self, attempt: int, index: int) -> None:
        """The sequence leaves, and the others of its attempt go on; also those that are to go on from its prompt, which
        the first of them then computes for the others.
        """
        parent = self._parent(attempt)
        if parent is None or index not in (parent.index, *parent.siblings):
            self.leave(attempt, index)
            return
        row = self.rows.row_of(*parent.key)
        siblings = tuple(one for one in parent.siblings if one != index)
        if index != parent.index:
            parent.siblings = siblings
            if row is not None:
                self.rows.siblings[row] = len(siblings)
            return
        order = parent.order + siblings[0] - index
        heir = replace(parent, index=siblings[0], order=order, siblings=siblings[1:], lost=0)
        if row is None:
            self.queue.replace(parent, heir)
        else:
            heir.preempted = True
            self.drop(row)
            self.queue.push(heir)

    def _parent(self, attempt: int) -> Sequence | None:
        """The one of its sequences from whose prompt others will go on."""
        waiting = (one for one in self._waiting(attempt) if one.siblings)
        running = (self.rows.row_of(attempt, index) for index in self.attempts.indices(attempt))
        parents = (self.rows.sequence(row) for row in running if row is not None and self.rows.siblings[row])
        return next(chain(waiting, parents), None)

    def _waiting(self, attempt: int) -> list[Sequence]:
        found = (self.queue.get(attempt, index) for index in self.attempts.indices(attempt))
        return [one for one in found if one is not None]

    def serve(self, attempt: int) -> None:
        """The first of its sequences starts: those that still wait have been served with it."""
        for sequence in self._waiting(attempt):
            sequence.preempted = True

    def advance(self, attempt: int) -> None:
        """All hypotheses of a search have made their offers, in their rows or since they gave these away: the best ones
        go on.
        """
        search = self.beams[attempt]
        rows = {slot: self.rows.row_of(attempt, slot) for slot in search.live}
        moves = search.next_round()
        for slot in rows.keys() - {move.parent for move in moves}:
            search.parked.pop(slot, None)
            self.leave(attempt, slot)
        if moves and (first := rows[moves[0].parent]) is not None:
            self.rows.take_siblings(first)  # no rows are kept free from now on: they are taken as they are needed
        for move in moves:
            row = rows[move.parent]
            if move.slot != move.parent:
                parent = search.parked[move.parent] if row is None else self.rows.sequence(row)
                child = parent.extended(move.slot, move.token)
                if row is not None and self.rows.free:
                    self.fork(row, child)
                    continue
                if row is not None:
                    child.lost = int(self.rows.scheduled[row])  # computed, but it will not be held for this one
                self.queue.push(child)
        for move in moves:
            row = rows[move.parent]
            if move.slot == move.parent:
                if row is None:
                    self.queue.push(search.parked.pop(move.slot).extended(move.slot, move.token))
                else:
                    self.rows.append(np.array([row], np.int32), np.array([move.token], np.int32))
                    self.rows.length[row] += 1
                    self.given[row] = move.token

    def idle(self) -> list[int]:
        """Rows of hypotheses that wait for others."""
        found = (self.rows.row_of(a, slot) for a, search in self.beams.items() for slot in search.offering)
        return [row for row in found if row is not None]

    def end_attempt(self, attempt: int, reason: EndReason, message: str = "", retry_after: float = 0.0) -> None:
        """Ends all of its sequences that have not ended."""
        ended = self.attempts.end_all(attempt, reason, message=message, retry_after=retry_after)
        search = self.beams.pop(attempt, None)
        for index in ended if search is None else range(search.width):
            self.leave(attempt, index)
