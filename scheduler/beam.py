"""Beam search as a page-table operation: what the scheduler knows of one, and how its next hypotheses are chosen.

Each live hypothesis is a sequence with a row of its own, whose pages are shared with those that it came from. A row
that has computed its last token offers its likeliest next tokens; when all have, the best of them go on (Graves, 2012;
Sutskever et al., 2014). Hypotheses that nobody goes on from let go of their pages, others are forked.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.events import Logprobs, Tokens
from scheduler.request import Request
from scheduler.rows import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """The last token of a hypothesis, and the hypothesis that it continues.

    Attributes:
        before: None for the first token.
        total: Sum of the logprobs of all its tokens.
        chosen: Logprob of this token.
        rank: Of this token among all, 1 is the likeliest.
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
        """From its first token to this one."""
        steps: list[Hypothesis] = []
        at: Hypothesis | None = self
        while at is not None:
            steps.append(at)
            at = at.before
        return steps[::-1]


class Candidate(NamedTuple):
    """A continuation of the hypothesis of a slot. total: as the continuation would have it."""

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
class Found:
    """A finished hypothesis. stopped: its last token is an end token, else it is as long as it may be."""

    last: Hypothesis
    score: float
    stopped: bool


@dataclass(slots=True, eq=False)
class BeamSearch:
    """One search over `width` slots, which are the indices of its sequences.

    In each round the 2 x width best continuations of all live hypotheses are looked at, by the sum of their logprobs
    (equal ones by slot, then by token id). Those that end with an end token are finished, with the score sum / length ^
    penalty, in which the end token counts; of the others the `width` best go on. It is over when nothing that goes on
    can get among the `count` best any more, or when what goes on is as long as it may be and so is finished too. So
    the result is that of the search that goes on to the end.

    alternatives: how many of each token are told. parked: hypotheses that gave their row away after they had made their
    offer.
    """

    width: int
    penalty: float
    count: int
    longest: int
    stop_ids: frozenset[int]
    alternatives: int = 0
    live: dict[int, Hypothesis | None] = field(default_factory=lambda: {0: None})
    parked: dict[int, Sequence] = field(default_factory=dict)
    finished: list[Found] = field(default_factory=list)
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
        """ids, logprobs: of its likeliest next tokens, 2 x width and as many as are told, or all that there are."""
        most = max(2 * self.width, self.alternatives)
        self._offers[slot] = ids[:most].copy(), logprobs[:most].copy()  # of the step's nothing is kept

    def has_offer(self, slot: int) -> bool:
        return slot in self._offers

    @property
    def offering(self) -> list[int]:
        """Slots that wait for others."""
        return list(self._offers)

    @property
    def is_ready(self) -> bool:
        return self._offers.keys() == self.live.keys()

    def next_round(self) -> list[Move]:
        """Chooses who goes on: a hypothesis in the slot of its parent, or in one that is free by then. Nothing moves
        any more where the search is over.
        """
        best = self._best()
        ended = [self._extended(one) for one in best if one.token in self.stop_ids]
        chosen = [one for one in best if one.token not in self.stop_ids][: self.width]
        going_on = [(self._extended(one), one.slot) for one in chosen]
        self.finished += [Found(hypothesis, self._score(hypothesis), True) for hypothesis in ended]
        if going_on and going_on[0][0].length == self.longest:
            self.finished += [Found(hypothesis, self._score(hypothesis), False) for hypothesis, _ in going_on]
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

    def result(self, attempt: int) -> Tokens:
        """The tokens of what was found, best first, as those of the attempt's sequences."""
        chains = [found.last.chain() for found in self.finished]
        steps = [step for chain in chains for step in chain]
        lengths = [len(chain) for chain in chains]
        return Tokens(
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
        """The best continuations of all slots, best first."""
        slots = sorted(self._offers)
        looked_at = 2 * self.width
        owners = np.repeat(slots, [len(self._offers[slot][0][:looked_at]) for slot in slots])
        ids, logprobs = (np.concatenate([self._offers[slot][part][:looked_at] for slot in slots]) for part in (0, 1))
        before = np.array([0.0 if (one := self.live[slot]) is None else one.total for slot in owners.tolist()])
        totals = before + logprobs.astype(np.float64)
        order = np.lexsort((ids, owners, -totals))[: 2 * self.width]
        return [Candidate(*one) for one in zip(*(a[order].tolist() for a in (owners, ids, totals)), strict=True)]

    def _extended(self, one: Candidate) -> Hypothesis:
        before, (ids, logprobs) = self.live[one.slot], self._offers[one.slot]
        chosen = logprobs[ids == one.token][0]
        rank = 1 + int(np.count_nonzero(logprobs > chosen))
        length = 1 if before is None else before.length + 1
        told = slice(0, self.alternatives)  # a view: the offers are this search's own, and are replaced, not changed
        return Hypothesis(before, one.token, one.total, length, float(chosen), rank, ids[told], logprobs[told])

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.total / hypothesis.length**self.penalty

    def _is_decided(self, best: Hypothesis) -> bool:
        """Whether not even the best that goes on can do better than those that are finished: its sum only falls, and
        its length is best where the penalty says so.
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
