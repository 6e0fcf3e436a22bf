"""An engine on a thread of the server's own process: the default where there is no GPU."""

import asyncio

from rpc.frontend.engine_client import EngineClient
from rpc.settings import EngineConfig
from scheduler.engine import Engine, Sink


class ThreadHost:
    """`EngineHost` of an engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        from rpc.assembly import assemble  # here, since it imports torch, which a server of other hosts does without

        self._assemble, self._config = assemble, config
        self._engine: Engine | None = None

    async def launch(self, sink: Sink) -> EngineClient:
        parts = await asyncio.to_thread(self._assemble, self._config)
        self._engine = engine = parts.engine(sink)
        engine.start()
        return engine

    async def stop(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
            self._engine = None
