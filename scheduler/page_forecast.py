"""Forecast of the pages that running rows still take, so that few are preempted for those admitted beside them.

Each row grows until it ends, and then frees all of its pages. With rows in order of their expected ends, pages are
scarcest at one of these ends: the rows that still run have grown by as many tokens as the ending one, and those that
ended before are gone (Gong et al., Past-Future Scheduler, ASPLOS 2025).

The forecast ends at a horizon. Where pages lack later than that, admission pays all the same, though it is undone: a
sequence of L tokens beside n others is drawn a token in each step, and each token of a step of a + b x n seconds is
worth (a + b x n) / n. A preemption costs b seconds for each of its tokens. So it pays from b x n / a x L steps on.

A forecast delays an admission and never prevents it: as rows end there is room, and beside none all are admitted. An
error of it costs a preemption, or a wait for one row to end.
"""

import math

import numpy as np
from numpy.typing import NDArray

from cache_manager.manager import CacheManager
from cache_manager.matching import Match
from scheduler.backpressure import Backpressure
from scheduler.output_lengths import EDGES, bucket_of
from scheduler.rows import Sequence
from scheduler.running import Running

Tokens = NDArray[np.float64]


def peak_growth(remaining: Tokens, held: Tokens) -> float:
    """Returns by how many tokens sequences together grow at most, before all have ended.

    Args:
        remaining: [n] tokens that each still takes, one a step.
        held: [n] tokens that each holds, and frees with its end.
    """
    order = np.argsort(-remaining)
    remaining, held = remaining[order], held[order]
    ended = held.sum() - np.cumsum(held)
    return float((np.arange(1, len(held) + 1) * remaining - ended).max())


class PageForecast:
    """Says whether running rows and one more sequence are expected to find pages up to the horizon.

    Layer groups with windows hold a bounded number of pages, which admission keeps free, so only others count.
    """

    def __init__(
        self, conservativeness: float, running: Running, cache: CacheManager, backpressure: Backpressure
    ) -> None:
        """conservativeness: horizon, as a multiple of the steps from which admission pays; 0 looks at no steps."""
        self._conservativeness, self._lengths, self._cost = conservativeness, backpressure.lengths, backpressure.cost
        self._running, self._rows, self._cache = running, running.rows, cache
        self._groups = sum(group.window is None for group in cache.layout.groups)
        size = running.rows.size
        self._totals = np.zeros((size, len(EDGES)))  # by row and bucket, as `OutputLengths.expected_beyond`
        self._serials = np.zeros(size, np.int64)  # of the sequences that they are of
        # Horizon of refusals by attempt and index of the sequence, since the last row was removed.
        self._refused: dict[tuple[int, int], float] = {}
        self._departures = 0  # rows that were removed by then

    def leaves_room(self, sequence: Sequence, match: Match) -> bool:
        """Whether a sequence that fits now is expected to fit, with those beside it, for the steps of the horizon.

        True where that is unknown, for a hypothesis of a search, which others may wait for in their rows, and where no
        running row goes on, so that waiting would be in vain.
        """
        if not self._conservativeness or not self._groups or not self._lengths.are_known:
            return True
        if sequence.request.beam is not None or self._rows.used == len(self._running.idle()):
            return True
        if not (horizon := self._horizon(sequence)):
            return True
        pool, size = self._cache.pool, self._cache.layout.page_size
        free = pool.free + pool.returning - self._cache.needed(match, sequence.length)
        most = self._rows.size * horizon * self._groups
        if most <= free * size:
            return True  # most admissions to a roomy pool end here: rows cannot grow by more
        # Until a row is removed, rows do as was expected, and nothing gets better but for a nearer horizon: most steps
        # of a full pool end here.
        if self._departures != self._rows.departures:
            self._refused, self._departures = {}, self._rows.departures
        refused = self._refused.get((sequence.attempt, sequence.index))
        if refused is not None and horizon >= refused:  # both are infinite where steps have no fixed cost
            return False
        remaining, held = self._growth(sequence)
        # Pages that rows share come back with the last of them: each frees its part of what all hold.
        part = min(1.0, (pool.total - free) * size / (held.sum() * self._groups))
        fits = peak_growth(np.minimum(remaining, horizon), part * held) * self._groups <= free * size
        if not fits:
            self._refused[sequence.attempt, sequence.index] = horizon
        return fits

    def _horizon(self, sequence: Sequence) -> float:
        """Returns the steps for which pages must be expected to last; 0 while the cost of steps is unknown."""
        fixed, each = self._cost.fit()
        if not each:
            return 0.0
        steps = each * (self._rows.used + 1) * sequence.length / fixed if fixed else math.inf
        return self._conservativeness * steps

    def _growth(self, sequence: Sequence) -> tuple[Tokens, Tokens]:
        """Returns the tokens that running rows and the sequence are expected still to take, and those that they hold.

        Sequences that go on from a prompt with others count too, as though they held nothing of their own.
        """
        rows, active = self._rows, self._rows.active()
        for row in active[rows.serial[active] != self._serials[active]].tolist():
            self._totals[row] = self._lengths.expected_beyond(rows.sequence(row).request)
            self._serials[row] = rows.serial[row]
        drawn = (rows.length[active] - rows.prompt[active]).astype(np.int64)
        most = rows.max_length[active] - rows.length[active]
        growing = np.clip(self._totals[active, bucket_of(drawn)] - drawn, 1, np.maximum(most, 1))
        own = self._remaining(sequence)
        siblings = int(rows.siblings[active].sum())
        remaining = np.concatenate(
            (growing, np.repeat(growing, rows.siblings[active]), np.full(1 + len(sequence.siblings), own))
        )
        held = np.concatenate(
            (rows.length[active], np.zeros(siblings), [sequence.length], np.zeros(len(sequence.siblings)))
        )
        return remaining, held

    def _remaining(self, sequence: Sequence) -> float:
        drawn = len(sequence.emitted)
        totals = self._lengths.expected_beyond(sequence.request)
        total = float(totals[bucket_of(np.array([drawn]))[0]])
        return min(max(total - drawn, 1.0), sequence.request.max_tokens - drawn)
