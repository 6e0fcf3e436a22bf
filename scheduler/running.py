"""Rows and their pages as sequences come and go, and what the next plan reports of it to the executor."""

import math
from dataclasses import replace
from itertools import chain

import numpy as np

from cache_manager.changes import NO_PAIRS
from cache_manager.manager import CacheManager
from cache_manager.matching import Match
from cache_manager.prefix import NONE
from scheduler.attempts import Attempts
from scheduler.beam import BeamSearch
from scheduler.counters import Counters
from scheduler.events import EndReason
from scheduler.policy import SchedulingPolicy
from scheduler.preemption_cause import PreemptionCause
from scheduler.queue import Queue
from scheduler.request import Request
from scheduler.rows import Rows, Sequence
from scheduler.step import NO_JUMPS, Ints, Join, KVTransfer

NO_ROWS: Ints = np.empty(0, np.int32)


class Running:
    """Running rows, waiting queue and open attempts. Sequences move between them here alone.

    Attributes:
        beams: Beam search by attempt.
        retired: Last step that has run, -1 before the first.
        joins: Sequences that took a row since the last plan.
        leaves: Rows that ended since the last plan.
        forced: Token that replaces a row's last draw, by row.
        jumps: Tokens that follow a row's last draw without draws of their own, by row, with the position of the first.
        jumping: Rows that have tokens of a jump to compute before they draw again.
        sitting_out: Rows of which no step is planned until the draw that is in flight is known.
        held: Request by attempt, where waiting sequences are not admitted before a `Ready` (`scheduler.readiness`).
    """

    def __init__(
        self, size: int, cache: CacheManager, counters: Counters, policy: SchedulingPolicy, holds: bool = False
    ) -> None:
        """holds: all sequences are held whenever they begin to wait, not only those with a grammar."""
        self.rows, self.queue, self.attempts = Rows(size), Queue(), Attempts()
        self.beams: dict[int, BeamSearch] = {}
        self.retired = -1
        self.joins: list[Join] = []
        self.leaves: list[int] = []
        self.forced: dict[int, int] = {}
        self.jumps: dict[int, tuple[int, Ints]] = {}
        self.jumping: set[int] = set()
        self.sitting_out: set[int] = set()
        self.held: dict[int, Request] = {}
        self._cache, self._counters, self._policy, self._holds = cache, counters, policy, holds

    def wait(self, sequence: Sequence, deadline: float = math.inf) -> None:
        """Queues a sequence. deadline: as in `Queue.push`."""
        self._policy.begins_to_wait(sequence, self.queue, self.rows)
        self.queue.push(sequence, deadline)
        if self._holds or sequence.request.controls.logits_params.grammar:
            self.held[sequence.attempt] = sequence.request

    def forget_ended(self) -> None:
        """Holds no attempts that have ended."""
        self.held = {attempt: request for attempt, request in self.held.items() if attempt in self.attempts}

    def take_forced(self) -> Ints:
        """Returns [n, 2] int32, as in the plan, and starts anew."""
        if not self.forced:
            return NO_PAIRS
        forced, self.forced = self.forced, {}
        return np.array(list(forced.items()), np.int32)

    def take_jumps(self) -> Ints:
        """Returns [n, 3] int32, as in the plan, and starts anew."""
        if not self.jumps:
            return NO_JUMPS
        jumps, self.jumps = self.jumps, {}
        return np.concatenate(
            [
                np.stack((np.full_like(tokens, row), np.arange(first, first + len(tokens), dtype=np.int32), tokens), 1)
                for row, (first, tokens) in jumps.items()
            ]
        )

    def take_leaves(self) -> Ints:
        """Returns [n] int32, as in the plan, and starts anew."""
        if not self.leaves:
            return NO_ROWS
        leaves, self.leaves = self.leaves, []
        return np.array(leaves, np.int32)

    def start(self, sequence: Sequence, match: Match) -> int:
        """Moves a sequence from the queue to a row, with pages for all its tokens; `match` has the first of them.

        Returns:
            The row.
        """
        self.queue.remove(*sequence.key)
        row = self.rows.add(sequence)
        self._cache.open(row, sequence.attempt, sequence.chain, match)
        self._cache.grow(row, match.tokens, sequence.length)
        self._cache.fetch(row, match)
        self.rows.schedule_from(row, match.tokens)
        self._join(row, sequence, self._transfer(row, sequence, match))
        sequence.transferred = {}
        return row

    def _transfer(self, row: int, sequence: Sequence, match: Match) -> KVTransfer | None:
        """Returns the content that came with the sequence, for the pages that it has been given for it."""
        if not match.transferred:
            return None
        pages = self._cache.transfer_targets(row, match)
        groups, which = np.nonzero(pages != NONE)
        content = [
            sequence.transferred[match.transferred[i]].of(g)
            for g, i in zip(groups.tolist(), which.tolist(), strict=True)
        ]
        self._counters.transferred += len(content)
        return KVTransfer(pages[groups, which], np.stack(content))

    def fork(self, row: int, sequence: Sequence) -> int:
        """Gives a sequence that goes on from `row` a row that shares its pages. Returns the new row."""
        child = self.rows.add(sequence)
        self.rows.schedule_from(child, int(self.rows.scheduled[row]))
        self.rows.last_step[child] = self.rows.last_step[row]
        sequence.chain = self._cache.fork(row, child, sequence.attempt)
        self._join(child, sequence)
        return child

    def _join(self, row: int, sequence: Sequence, transfer: KVTransfer | None = None) -> None:
        request = sequence.request
        self.joins.append(
            Join(
                row,
                sequence.tokens(),
                len(request.prompt),
                request.drawing,
                sequence.index,
                request.images,
                request.scope.bidirectional,
                transfer,
                request.beam is not None,
            )
        )

    def preempt(self, row: int, cause: PreemptionCause) -> None:
        """Takes a row from its sequence, which is queued again, or suspended by its search until all have offered."""
        sequence = self.rows.sequence(row)
        sequence.preempted, sequence.cause = True, cause
        sequence.preemptions += cause.counts_to_bound
        sequence.lost = max(sequence.lost, int(self.rows.scheduled[row]))
        self._counters.preemptions[cause] += 1
        self.drop(row)
        search = self.beams.get(sequence.attempt)
        if search is not None and search.has_offer(sequence.index):
            search.suspended[sequence.index] = sequence
        else:
            self.wait(sequence)

    def drop(self, row: int) -> None:
        """Frees a row. Its pages are free once the last step that touches them has retired."""
        last = int(self.rows.last_step[row])
        self.rows.remove(row)
        self._cache.release(row, last if last > self.retired else None)
        self.forced.pop(row, None)
        self.jumps.pop(row, None)
        self.jumping.discard(row)
        self.sitting_out.discard(row)
        unplanned = [join for join in self.joins if join.row == row]
        if unplanned:
            self.joins.remove(unplanned[0])  # the executor has not heard of the row
        else:
            self.leaves.append(row)

    def leave(self, attempt: int, index: int) -> None:
        """Removes a sequence from its row or from the queue."""
        row = self.rows.row_of(attempt, index)
        if row is not None:
            self.drop(row)
        else:
            self.queue.remove(attempt, index)

    def finish(self, attempt: int, index: int) -> None:
        """Removes one sequence; the others of its attempt go on.

        If others are to go on from its prompt, the first of them takes its place and computes the prompt for all.
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
        heir = replace(parent, index=siblings[0], order=order, siblings=siblings[1:], lost=0, preemptions=0)
        if row is None:
            self.queue.replace(parent, heir)
        else:
            heir.preempted, heir.cause = True, None
            self.drop(row)
            self.wait(heir)

    def _parent(self, attempt: int) -> Sequence | None:
        """Returns the attempt's sequence from whose prompt others will go on, if there is one."""
        waiting = (one for one in self._waiting(attempt) if one.siblings)
        running = (self.rows.row_of(attempt, index) for index in self.attempts.indices(attempt))
        parents = (self.rows.sequence(row) for row in running if row is not None and self.rows.siblings[row])
        return next(chain(waiting, parents), None)

    def _waiting(self, attempt: int) -> list[Sequence]:
        found = (self.queue.get(attempt, index) for index in self.attempts.indices(attempt))
        return [one for one in found if one is not None]

    def causes(self, attempt: int) -> tuple[PreemptionCause, ...]:
        """Returns the causes of the last preemptions of an attempt's sequences that have no row."""
        search = self.beams.get(attempt)
        suspended = [] if search is None else search.suspended.values()
        found = {sequence.cause for sequence in chain(self._waiting(attempt), suspended)}
        return tuple(cause for cause in PreemptionCause if cause in found)

    def serve(self, attempt: int) -> None:
        """Marks the attempt's waiting sequences as served, since the first of its sequences is admitted."""
        for sequence in self._waiting(attempt):
            sequence.preempted = True

    def advance(self, attempt: int) -> None:
        """Starts a search's next round, once each of its hypotheses has offered: the best go on.

        A hypothesis that is extended in several slots forks its row. If no row is free, the child is queued, and the
        tokens that it shares with its parent are computed again for it.
        """
        search = self.beams[attempt]
        rows = {slot: self.rows.row_of(attempt, slot) for slot in search.live}
        moves = search.next_round()
        for slot in rows.keys() - {move.parent for move in moves}:
            search.suspended.pop(slot, None)
            self.leave(attempt, slot)
        if moves and (first := rows[moves[0].parent]) is not None:
            self.rows.take_siblings(first)  # no rows are kept free from now on: they are taken as they are needed
        for move in moves:
            row = rows[move.parent]
            if move.slot != move.parent:
                parent = search.suspended[move.parent] if row is None else self.rows.sequence(row)
                child = parent.extended(move.slot, move.token)
                if row is not None and self.rows.free:
                    self.fork(row, child)
                    continue
                if row is not None:
                    child.lost = int(self.rows.scheduled[row])  # computed, and not kept for this child
                self._queue_hypothesis(child)
        for move in moves:
            row = rows[move.parent]
            if move.slot == move.parent:
                if row is None:
                    self._queue_hypothesis(search.suspended.pop(move.slot).extended(move.slot, move.token))
                else:
                    self.rows.append(np.array([row]), np.array([move.token], np.int32))
                    self.rows.length[row] += 1
                    self.forced[row] = move.token

    def _queue_hypothesis(self, sequence: Sequence) -> None:
        """Queues a hypothesis, whose request is not held: its grammar is there."""
        self._policy.begins_to_wait(sequence, self.queue, self.rows)
        self.queue.push(sequence)

    def idle(self) -> list[int]:
        """Returns rows whose hypotheses have offered and wait for the others of their search."""
        found = (self.rows.row_of(a, slot) for a, search in self.beams.items() for slot in search.offering)
        return [row for row in found if row is not None]

    def end_attempt(self, attempt: int, reason: EndReason, message: str = "", retry_after: float = 0.0) -> None:
        """Ends all of an attempt's sequences that have not ended."""
        ended = self.attempts.end_all(attempt, reason, message=message, retry_after=retry_after)
        search = self.beams.pop(attempt, None)
        for index in ended if search is None else range(search.width):
            self.leave(attempt, index)
