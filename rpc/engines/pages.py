"""The KV pages of an engine in this process, as its end of the engine link reads them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.block_hash import BlockHash, BlockHasher
from cache_manager.prefix import NONE
from cache_manager.transfers import TransferredPage, pages_to_transfer
from rpc.link.pages import PageCopy, PageForm
from scheduler.engine import Engine
from scheduler.events import Submit
from scheduler.rows import sequences_of
from scheduler.scheduler import Scheduler


class EnginePages:
    """`PagePort` of an engine.

    Args:
        engine: Runs reads on its thread.
        scheduler: Scheduler of the engine.
        hasher: Hashes the pages.
        numerics: See `EngineInfo`.
        export: Returns pages of the pool, int32 [n], in canonical form, uint8 [n, page_bytes]. Fewer where memory is
            lacking: those before the first that could not be copied. Runs on the engine's thread.

    Attributes:
        form: Size and numerics of the pages.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        hasher: BlockHasher,
        numerics: bytes,
        export: Callable[[NDArray[np.int32]], NDArray[np.uint8]],
    ) -> None:
        self._engine, self._hasher, self._export = engine, hasher, export
        self._index, self._cost = scheduler.cache.prefix.index, scheduler.backpressure.cost
        self._layout = scheduler.cache.layout
        self.form = PageForm.of(self._layout, numerics)

    def block_hashes(self, submit: Submit) -> list[list[tuple[BlockHash, bytes]]]:
        if submit.request.controls.prompt_logprobs:  # all of such a prompt is computed
            return []
        pages = []
        for sequence in sequences_of(submit, 0.0, 0):
            chain = self._hasher.chain(submit.request.scope)
            chain.extend(sequence.tokens())
            most = (sequence.length - 1) // self.form.page_size  # the last token is computed: its logits are needed
            pages.append(list(zip(chain.hashes, chain.contents, strict=True))[:most])
        return pages

    async def read(self, hashes: Sequence[BlockHash], size: int) -> AsyncIterator[list[PageCopy]]:
        needed = await asyncio.wrap_future(self._engine.call(lambda: self._needed(hashes)))
        counts, start = np.count_nonzero(needed != NONE, axis=0), 0
        while start < len(counts):
            fitting = np.searchsorted(np.cumsum(counts[start:]) * self.form.page_bytes, size, side="right")
            end = start + max(1, int(fitting))
            copying = partial(self._copy, hashes[start:end], needed[:, start:end])
            copies = await asyncio.wrap_future(self._engine.call(copying))
            if copies:
                yield copies
            if len(copies) < end - start:
                return
            start = end

    def _needed(self, hashes: Sequence[BlockHash]) -> Pages:
        """Returns [tables, n] the pages with these hashes to copy. Runs on the engine's thread, as `_copy` does."""
        return pages_to_transfer(self._index.pages[:, self._index.run(hashes)], self._layout)

    def _copy(self, hashes: Sequence[BlockHash], needed: Pages) -> list[PageCopy]:
        """Copies pages up to the first that has been evicted since `_needed` has found them, or lacks memory."""
        nodes = self._index.run(hashes)
        there = needed != NONE
        lost = ((self._index.pages[:, nodes] != needed[:, : len(nodes)]) & there[:, : len(nodes)]).any(axis=0)
        count = int(lost.argmax()) if lost.any() else len(nodes)
        if not count:
            return []
        content = self._export(needed.T[:count][there.T[:count]])
        ends = np.cumsum(np.count_nonzero(there[:, :count], axis=0))
        count = int(np.searchsorted(ends, len(content), side="right"))
        return [
            PageCopy(self._index.content(node), TransferredPage(there[:, i], part))
            for i, (node, part) in enumerate(zip(nodes[:count], np.split(content, ends[:count]), strict=False))
        ]

    def compute_seconds(self, tokens: int) -> float | None:
        return self._cost.expected(tokens)
