"""A socket whose bytes come late, as from far away or from a machine under load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def far_away(target: str, directory: Path, delay: float) -> AsyncIterator[str]:
    """The address at which the Unix socket `target` is reached, each byte `delay` seconds late in either direction."""
    loop, path = asyncio.get_running_loop(), directory / "far"
    passing = set[asyncio.Task[None]]()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(target.removeprefix("unix:"))
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(pass_on(source, sink))
            passing.add(task)
            task.add_done_callback(passing.discard)

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2**16):
                loop.call_later(delay, sink.write, data)
        except ConnectionError:
            pass  # that is the end of it too
        loop.call_later(delay, sink.close)

    server = await asyncio.start_unix_server(connect, path)
    try:
        yield f"unix:{path}"
    finally:
        server.close()
        for task in list(passing):
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
