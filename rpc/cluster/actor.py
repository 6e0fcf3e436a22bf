"""The Ray actor that hosts an engine."""

import asyncio
import os
import threading
import time
from functools import partial

from rpc.engines.engine_process import make_engine, run_and_report, run_engine, set_up_logging
from rpc.engines.reaping import die_with_parent
from rpc.settings import EngineConfig

LAST_WORDS = 5.0  # seconds


class EngineActor:
    """Made an actor by `rpc.cluster.driver`. `start` once, then `wait` runs as long as the engine does."""

    def start(self, config: str, listen: str, token: str, lease: float | None) -> str:
        """Serves the engine link on `listen` (unix:PATH, or "" for a port of this node's address); returns where it can
        be reached, before the model is loaded. token, lease: as in `run_engine`.
        """
        die_with_parent()
        set_up_logging()
        import ray

        at = listen or f"{ray.util.get_node_ip_address()}:0"
        self._why, self._address, bound = "", "", threading.Event()

        def opened(address: str) -> None:
            self._address = address
            bound.set()

        def run() -> None:
            never = asyncio.Event()  # a cluster that ends kills its actors
            engine = run_engine(partial(make_engine, EngineConfig.from_json(config)), at, never, token, opened, lease)
            self._why = run_and_report(lambda: asyncio.run(engine))
            bound.set()
            self._ended.set()
            time.sleep(LAST_WORDS)  # the driver hears why and ends this process, where it can be heard
            os._exit(1)

        self._ended = threading.Event()
        threading.Thread(target=run, name="quire-link", daemon=True).start()
        bound.wait()
        return self._address

    def wait(self) -> str:
        """Why the engine did not start, or has failed."""
        self._ended.wait()
        return self._why
