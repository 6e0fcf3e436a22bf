"""Logprobs of prompts, from logits that come part by part."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.sampler import LogitOps, SamplingRows, logprobs_of
from scheduler.events import Logprobs

PromptLogprobs = tuple[int, int, Logprobs]
"""A row, a position in its prompt, and the logprobs of prompt tokens from that position on."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptSlice:
    """Prompt tokens whose logprobs a request asks for.

    Attributes:
        row: Row of the sequence.
        start: Position of the first token in the sequence.
        tokens: [n] int32. The tokens.
    """

    row: int
    start: int
    tokens: NDArray[np.int32]

    def split(self, count: int) -> tuple["PromptSlice", "PromptSlice"]:
        """Returns the first `count` tokens, and the others."""
        behind = PromptSlice(self.row, self.start + count, self.tokens[count:])
        return PromptSlice(self.row, self.start, self.tokens[:count]), behind


class PromptReader:
    """Computes the logprobs of prompt slices.

    Attributes:
        found: Logprobs of the tokens whose logits have come, in order.
    """

    def __init__(self, prompts: Iterable[PromptSlice], controls: SamplingRows, ops: LogitOps) -> None:
        """Makes a reader.

        Args:
            prompts: The slices, in the order of their logits.
            controls: Controls of all batch rows.
            ops: Operations over rows of logits.
        """
        self.found: list[PromptLogprobs] = []
        self._due, self._controls, self._ops = deque(prompts), controls, ops

    def read(self, logits: Tensor) -> None:
        """Takes the logits of the next tokens, [n, vocabulary] float32. A part may end within a slice."""
        while len(logits):
            prompt, behind = self._due.popleft().split(len(logits))
            if len(behind.tokens):
                self._due.appendleft(behind)
            mine, logits = logits[: len(prompt.tokens)], logits[len(prompt.tokens) :]
            wanted = np.maximum(self._controls.top_logprobs[[prompt.row]], 0).repeat(len(mine))
            tokens = prompt.tokens.astype(np.int64)
            logprobs = logprobs_of(mine, tokens, wanted, self._ops.summary(mine))
            self.found.append((prompt.row, prompt.start, logprobs))
