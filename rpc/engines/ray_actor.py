"""The Ray actor that hosts an engine. Its one call runs as long as the engine does: its end is the actor's."""

import asyncio
from functools import partial
from pathlib import Path

from rpc.engines.engine_process import make_engine, run_and_report, run_engine, set_up_logging
from rpc.engines.reaping import die_with_parent
from rpc.settings import EngineConfig


class EngineActor:
    """Made an actor by `rpc.engines.ray_process`."""

    def run(self, config: str, directory: str) -> str:
        """Serves the engine link in `directory`; returns why the engine did not start, or has failed."""
        die_with_parent()
        set_up_logging()
        never = asyncio.Event()  # a cluster that ends kills its actors
        engine = run_engine(partial(make_engine, EngineConfig.from_json(config)), Path(directory), never)
        return run_and_report(lambda: asyncio.run(engine))
