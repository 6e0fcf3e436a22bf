"""The KV pages of an engine in this process, as its end of the link sees them."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.page_names import Name, PageNamer
from rpc.link.pages import PageCopy, PageForm
from scheduler.engine import Engine
from scheduler.events import Submit
from scheduler.rows import sequences_of
from scheduler.scheduler import Scheduler


class EnginePages:
    """`PagePort` of an engine. numerics: as in `EngineInfo`. export: gives pages of the pool in canonical form, uint8
    [n, page_bytes], on the engine's thread.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        namer: PageNamer,
        numerics: bytes,
        export: Callable[[NDArray[np.int32]], NDArray[np.uint8]],
    ) -> None:
        self._engine, self._namer, self._export = engine, namer, export
        self._index, self._cost = scheduler.cache.prefix.index, scheduler.admission.cost
        layout = scheduler.cache.layout
        self.form = PageForm(len(layout.groups), layout.page_bytes, layout.page_size, numerics)

    def named(self, submit: Submit) -> list[list[tuple[Name, bytes]]]:
        if submit.request.controls.prompt_logprobs:  # all of such a prompt is computed
            return []
        pages = []
        for sequence in sequences_of(submit, 0.0, 0):
            chain = self._namer.chain(submit.request.scope)
            chain.extend(sequence.tokens())
            most = (sequence.length - 1) // self.form.page_size  # the last token's logits are needed
            pages.append(list(zip(chain.names, chain.contents, strict=True))[:most])
        return pages

    async def read(self, names: Sequence[Name]) -> list[PageCopy]:
        return await asyncio.wrap_future(self._engine.call(lambda: self._read(names)))

    def _read(self, names: Sequence[Name]) -> list[PageCopy]:
        """On the engine's thread."""
        nodes = self._index.run(names)
        if not nodes:
            return []
        pages = self._index.pages[:, nodes]
        content = self._export(pages.T.reshape(-1)).reshape(len(nodes), self.form.groups, self.form.page_bytes)
        return [PageCopy(self._index.content(node), content[i]) for i, node in enumerate(nodes)]

    def computing(self, tokens: int) -> float | None:
        return self._cost.expected(tokens)
