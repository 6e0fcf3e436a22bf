"""Sequences on random pages of a pool, and the steps that they take part in."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.backend import StepShape

Slices = Sequence[tuple[int, int, int]]
"""Of each: sequence, first position, tokens."""
SPARE = 5  # pages that nobody has


@dataclass(frozen=True, slots=True, eq=False)
class Book:
    """Who has which pages of a pool of so many, in one layer group. table: int32 [rows, width]; what stands in it past
    a sequence's own pages is one that nobody has. rows: of the table, by sequence.
    """

    page_size: int
    pages: int
    table: NDArray[np.int32]
    rows: NDArray[np.int64]

    @staticmethod
    def of(lengths: Sequence[int], page_size: int, seed: int = 0) -> "Book":
        """lengths: tokens of each sequence."""
        rng = np.random.default_rng(seed)
        needed = [-(-length // page_size) for length in lengths]
        pages, rows = sum(needed) + SPARE, len(lengths) + 2
        shuffled = rng.permutation(pages).astype(np.int32)
        table = np.full((rows, max(needed) + 3), shuffled[-1], np.int32)
        places = rng.permutation(rows)[: len(lengths)]
        at = 0
        for row, count in zip(places, needed, strict=True):
            table[row, :count] = shuffled[at : at + count]
            at += count
        return Book(page_size, pages, table, places)

    def slots(self, sequence: int, start: int, count: int) -> NDArray[np.int64]:
        """Where these tokens lie."""
        where = np.arange(start, start + count)
        page = self.table[self.rows[sequence], where // self.page_size].astype(np.int64)
        return page * self.page_size + where % self.page_size

    def shape(self, slices: Slices) -> StepShape:
        packed = np.array([(self.rows[sequence], start, count) for sequence, start, count in slices], np.int32)
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in slices])
        slots = np.concatenate([self.slots(*one) for one in slices])
        return StepShape(packed, positions, slots[None], self.table[None], np.zeros(len(slices), np.int64))

    def sharing(self, sequences: Sequence[int], pages: int) -> "Book":
        """The same where all of these have the first pages of the first of them."""
        table = self.table.copy()
        for sequence in sequences:
            table[self.rows[sequence], :pages] = table[self.rows[sequences[0]], :pages]
        return Book(self.page_size, self.pages, table, self.rows)

    def without(self, sequence: int, first: int) -> tuple["Book", NDArray[np.int32]]:
        """The same where a sequence has lost its first so many pages, and which these were."""
        table, row = self.table.copy(), self.rows[sequence]
        lost = table[row, :first].copy()
        table[row, :first] = table[:, -1].max()
        return Book(self.page_size, self.pages, table, self.rows), lost


def picked(tensors: Sequence[Tensor], slices: Slices) -> Tensor:
    """Of each slice's sequence the rows of its tokens, one slice after the other."""
    return torch.cat([tensors[sequence][start : start + count] for sequence, start, count in slices])


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch allocates without filling it is NaN, so what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
