"""The built-in logits processors: the controls of a request, one class each, in vLLM's order (`BUILT_IN`).

Each is a `LogitsProcessor` of one sequence, as a user's own is. It also changes the rows of a whole step at once:
`apply_rows` touches only the tokens concerned, with a handful of operations however many rows ask for the control.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.controls import LogitsParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Tokens = NDArray[np.int32]


class BuiltIn(ABC):
    """A control of one sequence."""

    @classmethod
    @abstractmethod
    def of(cls, params: LogitsParams, prompt: Tokens) -> Self | None:
        """Makes the processor of a sequence; None where its request does not ask for this control."""

    def drew(self, token: int) -> None:  # noqa: B027 - most controls do not depend on the output
        """Records the next output token."""

    def apply(self, logits: Tensor, position: int) -> Tensor:
        """Changes the logits [vocabulary] of one draw, in place. As `apply_rows` of a single row, to the bit."""
        self.apply_rows(logits[None], np.zeros(1, np.int64), [self], np.array([position]))
        return logits

    @classmethod
    @abstractmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:
        """Changes the logits of a step's rows, in place.

        Args:
            logits: [m, vocabulary] float32.
            rows: [n] int64. Index in `logits` of each processor's row, ascending.
            processors: [n] processors of this class.
            positions: [n] int64. Output position of each draw.
        """


ApplyRows = Callable[[Tensor, Ints, Sequence[Any], Ints], None]
"""`BuiltIn.apply_rows` of one kind, as a device does it."""


class AllowedTokens(BuiltIn):
    """Leaves the allowed tokens alone and forbids all others."""

    def __init__(self, ids: Ints) -> None:
        self.ids = ids

    @classmethod
    def of(cls, params: LogitsParams, prompt: Tokens) -> Self | None:  # noqa: ARG003 - the contract's
        return cls(np.array(params.allowed, np.int64)) if params.allowed else None

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:  # noqa: ARG003
        places = _places(logits, rows, [one.ids for one in processors])
        kept = logits.view(-1).index_select(0, places)
        logits.index_fill_(0, _on(logits, rows), -torch.inf)
        _put(logits, places, kept)


class BannedSequences(BuiltIn):
    """Forbids each token that would complete a banned sequence of the output, such as a bad word."""

    def __init__(self, banned: Sequence[tuple[int, ...]]) -> None:
        self._always = [word[0] for word in banned if len(word) == 1]
        self._longer = [(word[:-1], word[-1]) for word in banned if len(word) > 1]
        self._most = max(map(len, banned)) - 1  # tokens of the output that matter
        self._last: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: LogitsParams, prompt: Tokens) -> Self | None:  # noqa: ARG003 - words of the prompt are no output
        return cls(params.banned) if params.banned else None

    def drew(self, token: int) -> None:
        if self._most:
            self._last = (*self._last, token)[-self._most :]

    def forbidden(self) -> list[int]:
        """Returns the ids that must not be drawn next."""
        last = self._last
        return self._always + [end for before, end in self._longer if last[-len(before) :] == before]

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:  # noqa: ARG003
        _forbid(logits, rows, [one.forbidden() for one in processors])


class MinTokens(BuiltIn):
    """Forbids the tokens that end a sequence as one of its first `least` tokens."""

    def __init__(self, least: int, ends: Sequence[int]) -> None:
        self._least, self._ends = least, ends

    @classmethod
    def of(cls, params: LogitsParams, prompt: Tokens) -> Self | None:  # noqa: ARG003 - the contract's
        return cls(params.min_tokens, params.not_yet) if params.min_tokens and params.not_yet else None

    def forbidden(self, position: int) -> Sequence[int]:
        """Returns the ids that must not be drawn at an output position."""
        return self._ends if position < self._least else ()

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:
        ids = [one.forbidden(position) for one, position in zip(processors, positions.tolist(), strict=True)]
        _forbid(logits, rows, ids)


class LogitBias(BuiltIn):
    """Adds a bias to the logits of some tokens."""

    def __init__(self, ids: Ints, bias: Floats) -> None:
        self._ids, self._bias = ids, bias

    @classmethod
    def of(cls, params: LogitsParams, prompt: Tokens) -> Self | None:  # noqa: ARG003 - the contract's
        if not params.bias:
            return None
        ids, amounts = zip(*params.bias, strict=True)
        return cls(np.array(ids, np.int64), np.array(amounts, np.float32))

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:  # noqa: ARG003
        places = _places(logits, rows, [one._ids for one in processors])
        bias = _on(logits, np.concatenate([one._bias for one in processors]))
        _put(logits, places, logits.view(-1).index_select(0, places) + bias)


class Penalties(BuiltIn):
    """Penalties of tokens that have occurred.

    Repetition (Keskar et al., CTRL, 2019) scales the logits of tokens of prompt and output. Frequency and presence
    (OpenAI's API) are subtracted for each time, and once, that a token is in the output.

    Attributes:
        amounts: Repetition, frequency and presence penalty.
        size: The number of tokens that have occurred.
        changes: The number of output tokens.
        latest: Place in `ids`, id and occurrences of the latest output token. Before the first one, those of place 0.
        on_device: Copy of `ids` and `counts` that a device keeps. It belongs to the function that applies them there.
    """

    def __init__(self, params: LogitsParams, prompt: Tokens) -> None:
        self.amounts = params.repetition, params.frequency, params.presence
        known = np.unique(prompt).astype(np.int64) if params.repetition != 1 else np.zeros(0, np.int64)
        self.size, self.changes = len(known), 0
        self.latest = 0, int(known[0]) if len(known) else 0, 0
        self._ids, self._counts = np.pad(known, (0, 64)), np.zeros(len(known) + 64, np.float32)
        self._place = dict(zip(known.tolist(), range(len(known)), strict=True))
        self.on_device: object = None

    @classmethod
    def of(cls, params: LogitsParams, prompt: Tokens) -> Self | None:
        off = (params.repetition, params.frequency, params.presence) == (1, 0, 0)
        return None if off else cls(params, prompt)

    @property
    def ids(self) -> Ints:
        """Tokens that have occurred, each once, [n] int64."""
        return self._ids[: self.size]

    @property
    def counts(self) -> Floats:
        """Occurrences of each of `ids` in the output, [n] float32; 0 for a token of the prompt alone."""
        return self._counts[: self.size]

    def drew(self, token: int) -> None:
        place = self._place.setdefault(token, self.size)
        if place == self.size:
            if place == len(self._ids):
                self._ids, self._counts = np.pad(self._ids, (0, place)), np.pad(self._counts, (0, place))
            self._ids[place] = token
            self.size += 1
        times = int(self._counts[place]) + 1
        self._counts[place] = times
        self.latest = place, token, times
        self.changes += 1

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:  # noqa: ARG003
        places = _places(logits, rows, [one.ids for one in processors])
        each = np.array([one.amounts for one in processors], np.float32)
        repetition, frequency, presence = each.repeat([len(one.ids) for one in processors], axis=0).T
        counts = np.concatenate([one.counts for one in processors])
        # On the host, so that one transfer brings all; the roundings are those of float32 on any device.
        scale, less, once = _on(logits, np.stack((repetition, frequency * counts, presence * (counts > 0))))
        values = logits.view(-1).index_select(0, places)
        values = torch.where(values > 0, values / scale, values * scale)
        _put(logits, places, values - less - once)


LATEST = 8  # tokens of whitespace before the beginning of reasoning


class ReasoningLimit(BuiltIn):
    """Ends the reasoning of a model after a number of tokens: then its end is the only token that can be drawn.

    Most models reason at the beginning of their output alone: what begins later like reasoning is text about it. As
    `thinking_token_budget` of vLLM.
    """

    def __init__(self, params: LogitsParams) -> None:
        """Makes the limit of these fields."""
        self._most, self._begin, self._end = params.reasoning_tokens, params.reasoning_begin, params.reasoning_end
        self._reasons, self._again = params.reasons, params.reasons_again
        # A constraint forbids the end within a character of several tokens: the model completes it first.
        self._constrained = bool(params.grammar)
        self._count = self._position = 0
        self._last: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: LogitsParams, prompt: Tokens) -> Self | None:  # noqa: ARG003 - `reasons` says what matters of it
        if params.reasoning_tokens < 0:
            return None
        return cls(params)

    def drew(self, token: int) -> None:
        awaited = self._end if self._reasons else self._begin
        self._last = (*self._last, token)[-len(awaited) :]
        self._count += self._reasons
        self._position += 1
        if self._last == awaited and (self._reasons or self._again or self._position <= len(awaited) + LATEST):
            self._reasons, self._last = not self._reasons, ()

    def forced(self) -> list[int]:
        """Returns the only token that can be drawn next, unless a constraint forbids it; none where any can."""
        if not self._reasons or self._count < self._most:
            return []
        known = next(n for n in range(len(self._end) - 1, -1, -1) if self._last[len(self._last) - n :] == self._end[:n])
        return [self._end[known]]

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:  # noqa: ARG003
        forced = [one.forced() for one in processors]
        for constrained in (False, True):
            which = [i for i, ids in enumerate(forced) if ids and processors[i]._constrained == constrained]
            if not which:
                continue
            own = rows[which]
            places = _places(logits, own, [np.array(forced[i], np.int64) for i in which])
            on_device = _on(logits, own)
            if constrained:
                top = logits.index_select(0, on_device).amax(-1)
                _put(logits, places, torch.where(top == -torch.inf, FINITE, top + ABOVE))
            else:
                kept = logits.view(-1).index_select(0, places)
                logits.index_fill_(0, on_device, -torch.inf)
                _put(logits, places, kept.clamp_(min=FINITE))


FINITE = -1e30  # logit at which a token that another control forbids can be drawn where nothing else can
ABOVE = 1e4  # distance of a logit above all others, of which none is drawn then

BUILT_IN: tuple[type[BuiltIn], ...] = (
    AllowedTokens,
    BannedSequences,
    MinTokens,
    LogitBias,
    Penalties,
    ReasoningLimit,
)
"""In the order in which they apply, which is vLLM's: a token that is forbidden stays so, and penalties see the bias."""


def _forbid(logits: Tensor, rows: Ints, ids: Sequence[Sequence[int]]) -> None:
    """Forbids token ids, by row, in place."""
    columns = np.array(list(chain.from_iterable(ids)), np.int64)
    if len(columns):
        places = _on(logits, (rows * logits.shape[1]).repeat([len(one) for one in ids]) + columns)
        logits.view(-1).index_fill_(0, places, -torch.inf)


def _places(logits: Tensor, rows: Ints, ids: Sequence[Ints]) -> Tensor:
    """Returns the index of each row's token ids in the flattened logits, [m] int64: one transfer to a GPU."""
    starts = (rows * logits.shape[1]).repeat([len(one) for one in ids])
    return _on(logits, starts + np.concatenate(ids))


def _put(logits: Tensor, places: Tensor, values: Tensor) -> None:
    """Writes values to indices of the flattened logits, in place. Equal indices have equal values."""
    # Not `put_`: torch does not count it as deterministic on a GPU.
    logits.view(-1).scatter_(0, places, values)


def _on(logits: Tensor, values: Ints | Floats) -> Tensor:
    """Copies values to the device of the logits, without waiting."""
    return torch.from_numpy(values).to(logits.device, non_blocking=True)
