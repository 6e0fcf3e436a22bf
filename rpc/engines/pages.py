"""The KV pages of an engine in this process, as its end of the engine link reads them."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash, BlockHasher
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
        export: Returns pages of the pool, int32 [n], in canonical form, uint8 [n, page_bytes]. Runs on the engine's
            thread.

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
        layout = scheduler.cache.layout
        self.form = PageForm(layout.tables, layout.page_bytes, layout.page_size, numerics)

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

    async def read(self, hashes: Sequence[BlockHash]) -> list[PageCopy]:
        return await asyncio.wrap_future(self._engine.call(lambda: self._read(hashes)))

    def _read(self, hashes: Sequence[BlockHash]) -> list[PageCopy]:
        """Copies the cached pages with these hashes. Runs on the engine's thread."""
        nodes = self._index.run(hashes)
        if not nodes:
            return []
        pages = self._index.pages[:, nodes]
        content = self._export(pages.T.reshape(-1)).reshape(len(nodes), self.form.groups, self.form.page_bytes)
        return [PageCopy(self._index.content(node), content[i]) for i, node in enumerate(nodes)]

    def compute_seconds(self, tokens: int) -> float | None:
        return self._cost.expected(tokens)
