"""The logits processors of a batch's rows: made as sequences join, updated by each draw, applied before it.

A row's processors are the built-in ones that its request asks for, in the order of `BUILT_IN`, then the user's own in
theirs. A step applies one kind after the other, each to all rows that have it. So a control costs a handful of
operations however many rows ask for it, and a row without processors costs nothing.

Their state depends on the prompt and the drawn tokens alone. A join makes all of a row's processors anew, also after a
preemption, and updates them with each token of the output so far.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.builtin_processors import BUILT_IN, BuiltIn
from model.sampling.logits_processors import NamedFactory, UserProcessors, args_of
from scheduler.controls import NO_LOGITS_PARAMS
from scheduler.step import Join

Ints = NDArray[np.int64]
Processor = BuiltIn | UserProcessors

KINDS: tuple[type[Processor], ...] = (*BUILT_IN, UserProcessors)
"""In the order in which they apply."""


class ProcessorRows:
    """Logits processors by batch row.

    Attributes:
        asking: [rows] bool. Rows that have a processor.
    """

    def __init__(self, rows: int, factories: Sequence[NamedFactory] = ()) -> None:
        """Makes rows that have none.

        Args:
            rows: The number of rows.
            factories: Factories of the user's logits processors of each sequence.
        """
        self.asking, self._factories = np.zeros(rows, np.bool_), factories
        self._rows: dict[int, list[tuple[int, Processor]]] = {}  # of a row, by index in KINDS

    def join(self, join: Join) -> None:
        """Makes the processors of a sequence that takes a row."""
        params, row = join.controls.logits_params, join.row
        prompt, output = join.tokens[: join.prompt_count], join.tokens[join.prompt_count :]
        made: list[Processor | None] = []
        if params != NO_LOGITS_PARAMS:
            made += [kind.of(params, prompt) for kind in BUILT_IN]
        if self._factories:
            made.append(UserProcessors.of(self._factories, prompt, args_of(params)))
        self._rows[row] = [(KINDS.index(type(one)), one) for one in made if one is not None]
        self.asking[row] = bool(self._rows[row])
        for token in output.tolist() if self._rows[row] else ():
            self._drew(row, token)

    def drew(self, rows: Ints, tokens: NDArray[np.int32]) -> None:
        """Updates processors with the tokens that their rows drew, below 0 for a row that drew none."""
        for i in np.flatnonzero(self.asking[rows] & (tokens >= 0)).tolist():
            self._drew(int(rows[i]), int(tokens[i]))

    def _drew(self, row: int, token: int) -> None:
        for _, processor in self._rows[row]:
            processor.drew(token)

    def apply(self, logits: Tensor, rows: Ints, positions: Ints) -> Tensor:
        """Changes the logits of rows that have processors.

        Args:
            logits: [n, vocabulary] float32. Left as they are: changes go to a copy.
            rows: [n] int64. Batch row of each.
            positions: [n] int64. Output position of each draw.

        Returns:
            [n, vocabulary] float32. `logits` itself where no row has a processor.

        Raises:
            RequestFault: A user's processor fails.
        """
        asking = np.flatnonzero(self.asking[rows]).tolist()
        if not asking:
            return logits
        changed = logits.clone()  # logprobs are of the raw logits, so these must stay
        groups = [(list[int](), list[Processor]()) for _ in KINDS]
        for i in asking:
            for number, processor in self._rows[int(rows[i])]:
                which, processors = groups[number]
                which.append(i)
                processors.append(processor)
        for kind, (which, processors) in zip(KINDS, groups, strict=True):
            if which:
                kind.apply_rows(changed, np.array(which), processors, positions[which])  # type: ignore[arg-type] # all of this kind
        return changed
