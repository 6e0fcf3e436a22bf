"""Sequences on random pages of a pool, and the shapes of their steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.backend import StepShape

Slices = Sequence[tuple[int, int, int]]
"""Sequence, first position and number of tokens of each slice."""
SPARE = 5  # pages of no sequence


@dataclass(frozen=True, slots=True, eq=False)
class Book:
    """Page tables of sequences, in one layer group.

    Attributes:
        page_size: Tokens of a page.
        pages: Number of pages in the pool.
        table: [rows, width] int32. Past a sequence's own pages it has a page of no sequence.
        rows: [sequences] int64. Each sequence's row of the table.
    """

    page_size: int
    pages: int
    table: NDArray[np.int32]
    rows: NDArray[np.int64]

    @staticmethod
    def of(lengths: Sequence[int], page_size: int, seed: int = 0) -> "Book":
        """Gives random pages to sequences of these lengths in tokens."""
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
        """Returns the slots of a sequence's tokens, [count] int64."""
        where = np.arange(start, start + count)
        page = self.table[self.rows[sequence], where // self.page_size].astype(np.int64)
        return page * self.page_size + where % self.page_size

    def shape(self, slices: Slices) -> StepShape:
        packed = np.array([(self.rows[sequence], start, count) for sequence, start, count in slices], np.int32)
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in slices])
        slots = np.concatenate([self.slots(*one) for one in slices])
        return StepShape(packed, positions, slots[None], self.table[None], np.zeros(len(slices), np.int64))

    def sharing(self, sequences: Sequence[int], pages: int) -> "Book":
        """Returns tables in which these sequences share the first `pages` pages of the first of them."""
        table = self.table.copy()
        for sequence in sequences:
            table[self.rows[sequence], :pages] = table[self.rows[sequences[0]], :pages]
        return Book(self.page_size, self.pages, table, self.rows)

    def without(self, sequence: int, first: int) -> tuple["Book", NDArray[np.int32]]:
        """Returns tables in which a sequence has lost its first `first` pages, and these pages."""
        table, row = self.table.copy(), self.rows[sequence]
        lost = table[row, :first].copy()
        table[row, :first] = table[:, -1].max()
        return Book(self.page_size, self.pages, table, self.rows), lost


def picked(tensors: Sequence[Tensor], slices: Slices) -> Tensor:
    """Returns the rows of the slices' tokens, one slice after the other."""
    return torch.cat([tensors[sequence][start : start + count] for sequence, start, count in slices])


@contextmanager
def poisoned() -> Iterator[None]:
    """Lets torch fill new memory with NaN, so that elements which a kernel does not write show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
