"""What an engine gives another one, where a test has both in its own thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash, BlockHasher
from cache_manager.transfers import TransferredPage
from rpc.engines.pages import EnginePages
from scheduler.events import Submit
from scheduler.scheduler import Scheduler


class AtOnce:
    """An engine's thread that is this one."""

    def call(self, wanted: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(wanted())
        return done


def transferred(
    scheduler: Scheduler,
    hasher: BlockHasher,
    export: Callable[[NDArray[np.int32]], NDArray[np.uint8]],
    submit: Submit,
    most: int | None = None,
) -> dict[BlockHash, TransferredPage]:
    """Returns what an engine gives of the pages that a request could start from, in messages of the link and back.

    Args:
        scheduler: The engine's.
        hasher: Hashes its pages.
        export: As of `EnginePages`.
        submit: The request, as the other engine gets it.
        most: Pages of each sequence that are asked for; None: all.
    """
    port, come = EnginePages(AtOnce(), scheduler, hasher, b"numerics", export), {}  # type: ignore[arg-type]

    async def read(wanted: list[tuple[BlockHash, bytes]]) -> None:
        hashes = iter(wanted)
        async for copies in port.read([block_hash for block_hash, _ in wanted], 3 * port.form.page_bytes):
            for copy, (block_hash, tokens) in zip(copies, hashes, strict=False):
                come[block_hash] = port.form.decode(port.form.encode(copy), tokens)

    for wanted in port.block_hashes(submit):
        asyncio.run(read(wanted[:most]))
    return come
