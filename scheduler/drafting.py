"""Drafting: gives rows draft tokens, and checks their draws once the step has run."""

from dataclasses import replace

import numpy as np

from cache_manager.manager import CacheManager
from scheduler.counters import Counters
from scheduler.drafts import LAST, NO_TOKENS, Drafted, Drafter, Ints
from scheduler.in_flight import InFlight
from scheduler.rows import Places
from scheduler.running import Running
from scheduler.settings import SchedulerSettings
from scheduler.slices import Wanted
from scheduler.step import StepResult


class Drafting:
    """Drafts for the rows of one engine. Writes `rows.drafts`, and through `Rows.settle` what checked rows have."""

    def __init__(
        self,
        drafter: Drafter,
        settings: SchedulerSettings,
        running: Running,
        cache: CacheManager,
        counters: Counters,
    ) -> None:
        self._drafter, self._most = drafter, min(settings.draft_tokens, settings.chunk - 1)
        self._budget = settings.step_tokens
        self._running, self._rows, self._cache, self._counters = running, running.rows, cache, counters

    # Before a step

    def propose(self, wanted: Wanted) -> dict[int, Ints]:
        """Returns the draft tokens of rows that decode, by row, with pages for them.

        A row gets none where its draws depend on the output before them, as with penalties or banned sequences. Nor
        does it where it is a beam search's, or before its newest token is known. Drafts are a bet: they take half of
        the budget that is left, and no page that a running row may need for its next token.
        """
        rows, drafts = self._rows, dict[int, Ints]()
        active = wanted.rows
        known = rows.length[active] == rows.prompt[active] + rows.emitted[active]
        may = (wanted.need == 1) & rows.may_draft[active] & known & (rows.emitted[active] > 0)
        left = (self._budget - len(active)) // 2
        for i in np.flatnonzero(may if wanted.covered is None else may & wanted.covered).tolist():
            row = int(active[i])
            most = min(self._most, left, int(rows.max_length[row] - rows.length[row]) - 1)
            tokens = self._drafter.propose(rows.sequence(row).tokens(), most)[:most] if most > 0 else NO_TOKENS
            if len(tokens) and self._has_room(row, int(wanted.starts[i]), len(tokens)):
                drafts[row] = tokens
                rows.drafts[row] = len(tokens)
                left -= len(tokens)
        return drafts

    def _has_room(self, row: int, start: int, count: int) -> bool:
        cache, end = self._cache, start + 1 + count
        if cache.covers(np.array([row], np.int32), np.array([end], np.int32))[0]:
            return True
        groups = cache.layout.tables
        more = groups * (count // cache.layout.page_size + 1)
        return cache.pool.free - more >= groups * self._rows.used and cache.grow(row, start, end)

    def draws(self, logits: Ints, drafts: dict[int, Ints]) -> tuple[Ints, Drafted]:
        """Has rows with drafts draw at their last token and at each draft.

        Args:
            logits: [n, 2] int32, as in the plan, with one draw a row, at its last draft.
            drafts: Draft tokens by row.
        """
        count = self._rows.drafts[logits[:, 1]]
        which = np.repeat(np.arange(len(logits)), 1 + count)
        place = np.arange(len(which)) - (np.cumsum(1 + count) - 1 - count)[which]
        spread = logits[which]
        spread[:, 0] += (place - count[which]).astype(np.int32)
        tokens = np.full(len(which), LAST, np.int32)
        tokens[place < count[which]] = np.concatenate([drafts[row] for row in logits[count > 0, 1].tolist()])
        return spread, Drafted(spread[:, 1], tokens)

    # After it

    def check(self, flown: InFlight, result: StepResult) -> tuple[InFlight, StepResult]:
        """Takes back draft tokens whose draws do not count. Returns step and result without these."""
        drafted, rows, drawn = flown.drafted, self._rows, result.tokens
        if drafted is None:
            return flown, result
        place = places(flown.drawing)
        stopped, full = rows.ends(flown.drawing, rows.emitted[flown.drawing] + place, drawn)
        counts = drafted.counting(np.where(stopped | full, LAST - 1, drawn))  # nothing counts behind an end
        slices = flown.slices.copy()
        (several,) = (np.isin(slices[:, 0], drafted.rows[drafted.tokens != LAST])).nonzero()
        for i in several.tolist():
            row, start, count = slices[i].tolist()
            tokens = drawn[counts & (drafted.rows == row)]
            slices[i, 2] = len(tokens)
            if rows.serial[row] and rows.serial[row] == flown.serials[row]:
                self._settle(row, start + len(tokens), tokens, count - len(tokens))
        kept = np.flatnonzero(counts)
        return (
            replace(flown, slices=slices, drawing=flown.drawing[kept], drafted=None),
            replace(result, tokens=drawn[kept], logprobs=result.logprobs.select(kept)),
        )

    def _settle(self, row: int, computed: int, tokens: Ints, rejected: int) -> None:
        self._counters.drafted += rejected + len(tokens) - 1
        self._counters.accepted += len(tokens) - 1
        self._rows.settle(row, computed, tokens)
        if rejected:
            self._cache.truncate(row, computed + 1)
            self._running.forced[row] = int(tokens[-1])  # the executor has what the row drew last


def places(rows: Places) -> Ints:
    """Returns [n]: the place of each among those of its row, which stand together."""
    place = np.arange(len(rows), dtype=np.int32)
    first = np.where(np.append(True, rows[1:] != rows[:-1])[: len(rows)], place, 0)
    return place - np.maximum.accumulate(first)
