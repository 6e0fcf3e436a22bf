"""An engine on a thread of the server's own process: the default where there is no GPU."""

import asyncio
import sys
from importlib import import_module

from model.simulated.naming import is_simulated
from rpc.engines.local import LocalEngine
from rpc.frontend.engine_client import EngineClient
from rpc.heap import freeze_heap
from rpc.settings import EngineConfig
from scheduler.engine import Sink

# Seconds until a thread that wants the interpreter gets it (5 ms by default). An engine asks for it several times a
# step, and the event loop may be writing a large result then. Beside 6 beam searches of width 16, the longest gap
# between two tokens of another client falls from 231 to 147 ms (median of 3). Throughput stays (`bench.neighbours`).
SWITCH_INTERVAL = 0.0005


class ThreadHost:
    """`EngineHost` of an engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._engine: LocalEngine | None = None

    async def prepare(self) -> None:
        # Not at the top of this file: servers whose engines run elsewhere do without torch. In a thread: the import
        # takes seconds, and the server answers already.
        simulated = is_simulated(self.config.model.model)
        await asyncio.to_thread(import_module, "rpc.engines.simulated" if simulated else "rpc.engines.assembly")
        freeze_heap()
        sys.setswitchinterval(SWITCH_INTERVAL)

    async def launch(self, sink: Sink) -> EngineClient:
        self._engine = engine = await asyncio.to_thread(_make, self.config, sink)
        engine.start()
        return engine

    async def stop(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
            self._engine = None

    async def close(self) -> None:
        """Does nothing, since nothing is kept between launches."""


def _make(config: EngineConfig, sink: Sink) -> LocalEngine:
    if is_simulated(config.model.model):
        from rpc.engines.simulated import make_simulated

        return make_simulated(config, sink)
    from rpc.engines.assembly import assemble

    return assemble(config).engine(sink)
