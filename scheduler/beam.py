"""Beam search as a page-table operation: the state of one search, and the choice of its next hypotheses.

Each live hypothesis is a sequence with a row of its own, which shares pages with the hypotheses that it came from. A
row that has computed its last token offers its likeliest next tokens. Once all rows have, the best continuations go on
(Graves, 2012; Sutskever et al., 2014). A hypothesis without a continuation frees its pages; one with several is forked.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.events import Logprobs, NewTokens
from scheduler.request import Request
from scheduler.rows import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """The last token of a hypothesis, and the hypothesis that it continues.

    Attributes:
        before: None for the first token.
        total: Sum of the logprobs of all its tokens.
        chosen: Logprob of this token.
        rank: Rank of this token among all, 1 is the likeliest; beside a constraint among allowed ones.
        top_ids: [alternatives] likeliest first, as its row offered them.
        top: [alternatives] their logprobs.
    """

    before: "Hypothesis | None"
    token: int
    total: float
    length: int
    chosen: float
    rank: int
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]

    def chain(self) -> list["Hypothesis"]:
        """Returns the hypothesis from its first token to this one."""
        steps: list[Hypothesis] = []
        at: Hypothesis | None = self
        while at is not None:
            steps.append(at)
            at = at.before
        return steps[::-1]


class Candidate(NamedTuple):
    """A continuation of the hypothesis of a slot. total: sum of logprobs with this token."""

    slot: int
    token: int
    total: float


@dataclass(frozen=True, slots=True)
class Move:
    """The hypothesis of slot `parent` goes on with `token`, in `slot`."""

    parent: int
    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class FinishedHypothesis:
    """A finished hypothesis. stopped: its last token is a stop token; else it has the longest length."""

    last: Hypothesis
    score: float
    stopped: bool


@dataclass(slots=True, eq=False)
class BeamSearch:
    """One search over `width` slots, which are the indices of its sequences.

    Each round ranks the 2 x width best continuations of all live hypotheses by the sum of their logprobs. Equal ones
    are ranked by slot, then by token id. Continuations by a stop token are finished, with the score sum / length ^
    penalty, in which the stop token counts. The `width` best of the others go on. The search is over once no hypothesis
    that goes on can get among the `count` best. It is also over once those that go on have the longest length, and are
    finished too. So the result is that of a search to the end. A constraint may leave fewer outputs than are wanted:
    then it is over when all are found.

    Attributes:
        width: Slots.
        penalty: Exponent of the length in a score.
        count: Hypotheses wanted.
        longest: Tokens of an output at most.
        stop_ids: Tokens that finish a hypothesis.
        alternatives: Alternatives reported of each token.
        live: Hypothesis by slot; None for the prompt.
        suspended: Hypotheses, by slot, that gave their row away after they had offered.
        finished: Best first, `count` at most.
    """

    width: int
    penalty: float
    count: int
    longest: int
    stop_ids: frozenset[int]
    alternatives: int = 0
    live: dict[int, Hypothesis | None] = field(default_factory=lambda: {0: None})
    suspended: dict[int, Sequence] = field(default_factory=dict)
    finished: list[FinishedHypothesis] = field(default_factory=list)
    _offers: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=dict)

    @staticmethod
    def of(request: Request) -> "BeamSearch | None":
        beam = request.beam
        if beam is None:
            return None
        return BeamSearch(
            beam.width,
            beam.length_penalty,
            request.count,
            request.max_tokens,
            frozenset(request.stop_ids),
            max(0, request.controls.top_logprobs),
        )

    def offer(self, slot: int, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Takes a slot's likeliest next tokens.

        Args:
            slot: Slot.
            ids: [n] int32, likeliest first. At least 2 x width and `alternatives`, or the whole vocabulary.
            logprobs: [n] float32. -inf for a token that a constraint forbids: no hypothesis goes on with it.
        """
        most = max(2 * self.width, self.alternatives)
        self._offers[slot] = ids[:most].copy(), logprobs[:most].copy()  # copies: the step's arrays are not kept alive

    def has_offer(self, slot: int) -> bool:
        return slot in self._offers

    @property
    def offering(self) -> list[int]:
        """Slots that have offered and wait for the others."""
        return list(self._offers)

    @property
    def is_ready(self) -> bool:
        return self._offers.keys() == self.live.keys()

    def next_round(self) -> list[Move]:
        """Chooses the hypotheses that go on.

        Returns:
            Their moves: the first continuation of a parent keeps its slot, others take slots that are free by then.
            None where the search is over.
        """
        best = self._best()
        ended = [self._extended(one) for one in best if one.token in self.stop_ids]
        chosen = [one for one in best if one.token not in self.stop_ids][: self.width]
        going_on = [(self._extended(one), one.slot) for one in chosen]
        self.finished += [FinishedHypothesis(hypothesis, self._score(hypothesis), True) for hypothesis in ended]
        if going_on and going_on[0][0].length == self.longest:
            self.finished += [
                FinishedHypothesis(hypothesis, self._score(hypothesis), False) for hypothesis, _ in going_on
            ]
            going_on = []
        self.finished = sorted(self.finished, key=lambda found: -found.score)[: self.count]
        self._offers.clear()
        if not going_on or self._is_decided(going_on[0][0]):
            self.live = {}
            return []
        return self._placed(going_on)

    @property
    def is_over(self) -> bool:
        return not self.live

    def result(self, attempt: int) -> NewTokens:
        """Returns the tokens of the finished hypotheses, best first, as those of the attempt's sequences."""
        chains = [found.last.chain() for found in self.finished]
        steps = [step for chain in chains for step in chain]
        lengths = [len(chain) for chain in chains]
        return NewTokens(
            np.full(len(steps), attempt, np.int64),
            np.repeat(np.arange(len(chains), dtype=np.int32), lengths),
            np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            np.array([step.token for step in steps], np.int32),
            Logprobs(
                np.array([step.chosen for step in steps], np.float32),
                np.array([step.rank for step in steps], np.int32),
                np.array([step.top_ids for step in steps], np.int32),
                np.array([step.top for step in steps], np.float32),
            ),
        )

    def _best(self) -> list[Candidate]:
        """Returns the best continuations of all slots, best first."""
        slots = sorted(self._offers)
        looked_at = 2 * self.width
        owners = np.repeat(slots, [len(self._offers[slot][0][:looked_at]) for slot in slots])
        ids, logprobs = (np.concatenate([self._offers[slot][part][:looked_at] for slot in slots]) for part in (0, 1))
        before = np.array([0.0 if (one := self.live[slot]) is None else one.total for slot in owners.tolist()])
        totals = before + logprobs.astype(np.float64)
        order = np.lexsort((ids, owners, -totals))[: min(2 * self.width, np.count_nonzero(totals > -np.inf))]
        return [Candidate(*one) for one in zip(*(a[order].tolist() for a in (owners, ids, totals)), strict=True)]

    def _extended(self, one: Candidate) -> Hypothesis:
        before, (ids, logprobs) = self.live[one.slot], self._offers[one.slot]
        chosen = logprobs[ids == one.token][0]
        rank = 1 + int(np.count_nonzero(logprobs > chosen))
        length = 1 if before is None else before.length + 1
        best = slice(0, self.alternatives)  # a view: offers are this search's own, and are replaced, not changed
        return Hypothesis(before, one.token, one.total, length, float(chosen), rank, ids[best], logprobs[best])

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.total / hypothesis.length**self.penalty

    def _is_decided(self, best: Hypothesis) -> bool:
        """Whether no hypothesis that goes on can beat those that are finished.

        Its sum only falls with more tokens. Its length is the best for its score at one of the two ends, by the sign of
        the penalty.
        """
        if len(self.finished) < self.count:
            return False
        length = self.longest if self.penalty > 0 else best.length + 1
        return best.total / length**self.penalty <= self.finished[-1].score

    def _placed(self, going_on: list[tuple[Hypothesis, int]]) -> list[Move]:
        parents = {slot for _, slot in going_on}
        free = [slot for slot in range(self.width) if slot not in parents]
        live, moves = dict[int, Hypothesis | None](), list[Move]()
        for hypothesis, parent in going_on:
            slot = free.pop(0) if parent in live else parent
            live[slot] = hypothesis
            moves.append(Move(parent, slot, hypothesis.token))
        self.live = live
        return moves
