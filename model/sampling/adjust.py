"""Logits changed before a draw: allowed tokens, bad words, least lengths, biases and penalties, in vLLM's order.

Only rows that ask for something are touched, and of these only the tokens concerned. What depends on the tokens so far
is kept by row; a join sets all of it anew.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.logits_processors import LogitsProcessorFactory, RowProcessors
from scheduler.controls import NO_ADJUSTMENTS, Adjustments
from scheduler.step import Join

Ints = NDArray[np.int64]


class _Row:
    """A row whose logits are changed, and its tokens.

    Attributes:
        allowed, biased, bias: Of `wanted`, as arrays.
        ids: [n] int64. Tokens that penalties concern, each once.
        counts: [n] int64. How often each is in the output.
        processors: Of a user's own.
    """

    def __init__(
        self, wanted: Adjustments, prompt: NDArray[np.int32], output: NDArray[np.int32], processors: RowProcessors
    ) -> None:
        self.wanted, self.processors = wanted, processors
        self.allowed = np.array(wanted.allowed, np.int64)
        self.biased = np.array([token for token, _ in wanted.bias], np.int64)
        self.bias = np.array([amount for _, amount in wanted.bias], np.float32)
        self.penalised = wanted.repetition != 1 or wanted.frequency != 0 or wanted.presence != 0
        self._size = 0
        self._ids, self._counts = np.zeros(64, np.int64), np.zeros(64, np.int64)
        self._place: dict[int, int] = {}
        self._remembered = max((len(word) - 1 for word in wanted.banned), default=0)
        self._last: list[int] = []
        for token in np.unique(prompt).tolist() if wanted.repetition != 1 else ():
            self._count(token, 0)
        for token in output.tolist():
            self._note(token)

    @property
    def ids(self) -> Ints:
        return self._ids[: self._size]

    @property
    def counts(self) -> Ints:
        return self._counts[: self._size]

    def drew(self, token: int) -> None:
        self._note(token)
        self.processors.drew(token)

    def _note(self, token: int) -> None:
        if self.penalised:
            self._count(token, 1)
        if self._remembered:
            self._last = [*self._last, token][-self._remembered :]

    def _count(self, token: int, times: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids, self._counts = np.pad(self._ids, (0, place)), np.pad(self._counts, (0, place))
            self._ids[place] = token
            self._size += 1
        self._counts[place] += times

    def forbidden(self, position: int) -> list[int]:
        """Ids that must not be drawn at this output position."""
        ends = [word[-1] for word in self.wanted.banned if self._ends_with(word[:-1])]
        return [*ends, *self.wanted.not_yet] if position < self.wanted.min_tokens else ends

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return not tokens or tuple(self._last[-len(tokens) :]) == tokens


class AdjustedRows:
    """The rows of a batch whose logits are changed before a draw.

    Attributes:
        asking: [rows] bool. Rows with controls or processors of their own.
    """

    def __init__(self, rows: int, factories: Sequence[LogitsProcessorFactory] = ()) -> None:
        """factories: make the logits processors of each sequence."""
        self.asking, self._factories = np.zeros(rows, np.bool_), factories
        self._rows: dict[int, _Row] = {}

    def join(self, join: Join) -> None:
        wanted, row = join.controls.adjustments, join.row
        self._rows.pop(row, None)
        prompt, output = join.tokens[: join.prompt_count], join.tokens[join.prompt_count :]
        processors = RowProcessors(self._factories, prompt, output)
        self.asking[row] = wanted != NO_ADJUSTMENTS or bool(processors)
        if self.asking[row]:
            self._rows[row] = _Row(wanted, prompt, output, processors)

    def drew(self, rows: Ints, tokens: NDArray[np.int32]) -> None:
        """rows: that drew these tokens, below 0 where one could not."""
        for i in np.flatnonzero(self.asking[rows] & (tokens >= 0)).tolist():
            self._rows[int(rows[i])].drew(int(tokens[i]))

    def apply(self, logits: Tensor, rows: Ints, positions: Ints) -> Tensor:
        """logits: float32 [n, vocabulary] of these batch rows, which are about to draw at these output positions.
        Returns them changed, or as they are where nobody asks for anything. Raises RequestFault where a row's logits
        processor fails.
        """
        which = np.flatnonzero(self.asking[rows])
        if not len(which):
            return logits
        asking = [self._rows[row] for row in rows[which].tolist()]
        changed = logits.clone()
        _allow(changed, which, [row.allowed for row in asking])
        forbidden = [row.forbidden(position) for row, position in zip(asking, positions[which].tolist(), strict=True)]
        changed[_places(which, forbidden, logits.device)] = -torch.inf
        bias = torch.from_numpy(np.concatenate([row.bias for row in asking])).to(logits.device, non_blocking=True)
        changed[_places(which, [row.biased for row in asking], logits.device)] += bias
        _penalise(changed, which, asking)
        for i, row, position in zip(which.tolist(), asking, positions[which].tolist(), strict=True):
            if row.processors:
                changed[i] = row.processors.apply(changed[i].clone(), position)
        return changed


Places = tuple[Tensor, Tensor]


def _places(which: Ints, ids: Sequence[Sequence[int] | Ints], device: torch.device) -> Places:
    """Row and column of these token ids, of each of these rows."""
    rows = np.repeat(which, [len(one) for one in ids])
    columns = np.concatenate([np.asarray(one, np.int64) for one in ids])
    return torch.from_numpy(rows).to(device, non_blocking=True), torch.from_numpy(columns).to(device, non_blocking=True)


def _allow(logits: Tensor, which: Ints, allowed: list[Ints]) -> None:
    """allowed: by row; where there is none, all are."""
    limited = which[[len(ids) > 0 for ids in allowed]]
    if len(limited):
        places = _places(which, allowed, logits.device)
        kept = logits[places]
        logits[torch.from_numpy(limited).to(logits.device, non_blocking=True)] = -torch.inf
        logits[places] = kept


def _penalise(logits: Tensor, which: Ints, asking: list[_Row]) -> None:
    """Keskar et al., CTRL, 2019 (repetition); the other two are OpenAI's."""
    sizes = [len(row.ids) for row in asking]
    places = _places(which, [row.ids for row in asking], logits.device)

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device, non_blocking=True)

    counts = torch.from_numpy(np.concatenate([row.counts for row in asking])).to(
        logits.device, torch.float32, non_blocking=True
    )
    repetition = spread([row.wanted.repetition for row in asking])
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - spread([row.wanted.frequency for row in asking]) * counts
    logits[places] = values - spread([row.wanted.presence for row in asking]) * (counts > 0)
