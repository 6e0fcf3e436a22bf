"""The Ray actor that hosts an engine."""

import asyncio
import threading
from functools import partial

from rpc.engines.engine_process import make_engine, run_and_report, run_engine, set_up_logging
from rpc.engines.reaping import die_with_parent
from rpc.settings import EngineConfig


class EngineActor:
    """Made an actor by `rpc.cluster.driver`. `start` once, then `wait` runs as long as the engine does."""

    def start(self, config: str, listen: str, token: str) -> str:
        """Serves the engine link on `listen` (unix:PATH, or "" for a port of this node's address); returns where it can
        be reached, before the model is loaded. token: what frontends have to show.
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
            engine = run_engine(partial(make_engine, EngineConfig.from_json(config)), at, never, token, opened)
            self._why = run_and_report(lambda: asyncio.run(engine))
            bound.set()

        self._engine = threading.Thread(target=run, name="quire-link", daemon=True)
        self._engine.start()
        bound.wait()
        return self._address

    def wait(self) -> str:
        """Why the engine did not start, or has failed."""
        self._engine.join()
        return self._why
