"""Moves of pages around a step: to and from the host, within the pool, and out of it for other engines."""

import logging
import time

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend
from model.page_store import Store, copy_or_lose, parts_of
from scheduler.step import StepPlan

log = logging.getLogger("quire.pages")


class PageMoves:
    """Applies the moves of plans to the KV pool, and knows the layer group of each page.

    Attributes:
        store: Memory that pages are swapped to; None without swapping.
    """

    def __init__(
        self, attention: AttentionBackend, layout: KVLayout, pages: int, poison: bool, store: Store | None
    ) -> None:
        """Makes moves for a pool that is allocated already.

        Args:
            attention: Back end that owns the KV pool.
            layout: Layout of the KV pool.
            pages: The number of pages.
            poison: Fill freed pages with NaN.
            store: Memory that pages are swapped to. None without swapping.
        """
        self.store, self._attention, self._poison = store, attention, poison
        self._page_bytes = layout.page_bytes
        self._has_groups = layout.tables > 1
        self._groups_of_pages = np.zeros(pages, np.int32)  # the layer group that each page was last given to

    def apply(self, plan: StepPlan) -> tuple[tuple[int, ...], float]:
        """Moves the pages of a plan, before its slices are computed.

        The order is the plan's: pages are saved before any is poisoned, copied or filled, since their content is then
        gone.

        Returns:
            Pages that could not be filled, as `StepResult.lost_pages`; seconds, as `StepResult.swap_seconds`.
        """
        began, lost = time.perf_counter(), list[int]()
        if self.store is not None and len(plan.swap_outs):
            self.store.save(self._with_groups(plan.swap_outs, plan.swap_outs[:, 0]))
        swapped = time.perf_counter() - began
        if self._poison and len(plan.freed):
            self._attention.poison(plan.freed)
        # A page keeps its group until it is given to a row again: a swap-out reads it after the row has left.
        if len(plan.grown) and self._has_groups:
            self._groups_of_pages[plan.grown[:, 3]] = plan.grown[:, 0]
        lost += self._copy(plan.copies)
        began = time.perf_counter()
        if self.store is not None and len(plan.swap_ins):
            lost += self.store.load(self._with_groups(plan.swap_ins, plan.swap_ins[:, 1])).tolist()
        for transfer in (join.transfer for join in plan.joins):
            if transfer is not None:
                lost += self._fill(transfer.pages, transfer.content)
        return tuple(lost), swapped + time.perf_counter() - began

    def _copy(self, copies: NDArray[np.int32]) -> list[int]:
        """Copies pages [n, 2] to pages. Returns the targets for which the device lacked memory."""
        lost = list[int]()
        for part in parts_of(copies, self._page_bytes):
            lost += copy_or_lose(self._attention, part).tolist()
        if lost:
            log.warning("out of memory: %d of %d pages were not copied, they are computed anew", len(lost), len(copies))
        return lost

    def _fill(self, pages: NDArray[np.int32], content: NDArray[np.uint8]) -> list[int]:
        """Fills pages with what came from another engine. Returns those for which the device lacked memory."""
        lost = list[int]()
        for some, bytes_of_some in zip(
            parts_of(pages, self._page_bytes), parts_of(content, self._page_bytes), strict=True
        ):
            try:
                self._attention.import_pages(some, self._groups_of_pages[some], torch.from_numpy(bytes_of_some))
            except torch.OutOfMemoryError:
                lost += some.tolist()
        if lost:
            log.warning("out of memory: %d of %d pages did not arrive, they are computed anew", len(lost), len(pages))
        return lost

    def export(self, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copies pages to the host, up to the first for which the device lacks memory. See `Runner.export`."""
        content, copied = np.empty((len(pages), self._page_bytes), np.uint8), 0
        for part in parts_of(pages, self._page_bytes):
            try:
                content[copied : copied + len(part)] = self._attention.export(part, self._groups_of_pages[part]).cpu()
            except torch.OutOfMemoryError:
                log.warning(
                    "out of memory: %d of %d pages are not available to another engine, which computes them",
                    len(pages) - copied, len(pages),
                )  # fmt: skip
                return content[:copied]
            copied += len(part)
        return content

    def _with_groups(self, moves: NDArray[np.int32], pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns [n, 3] the moves, each with the layer group of its page."""
        return np.column_stack((moves, self._groups_of_pages[pages]))
