"""The Ray actors of an engine: one hosts it and is rank 0 of its group, the others follow."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from model.errors import RankLost
from model.parallel.sockets import host_port, new_local
from rpc.distribution import own_version
from rpc.engines.engine_process import exporter_of, make_engine, run_and_report, run_engine
from rpc.engines.reaping import die_with_parent
from rpc.observe.logs import set_up_logging
from rpc.settings import EngineConfig

LAST_WORDS = 5.0  # seconds


class EngineActor:
    """Made an actor by `rpc.cluster.driver`. `start` once, then `wait` runs as long as the engine does."""

    def start(
        self,
        version: str,
        config: str,
        listen: str,
        token: str,
        lease: float | None,
        followers: Sequence[Any],
        apart: bool,
    ) -> str:
        """Serves the engine link on `listen` (unix:PATH, or "" for a port of this node's address); returns where it can
        be reached, before the model is loaded, "" where it does not start. version: of the server's Quire. token,
        lease: as in `run_engine`. followers: actors of ranks 1 and up. apart: they may be on other nodes.
        """
        die_with_parent()
        set_up_logging()
        import ray

        node = ray.util.get_node_ip_address()
        at = listen or host_port(node, 0)
        self._why, self._address, bound = "", "", threading.Event()

        def opened(address: str) -> None:
            self._address = address
            bound.set()

        def run() -> None:
            never = asyncio.Event()  # a cluster that ends kills its actors
            actors = partial(FollowerActors, host_port(node, 0) if apart else new_local(), followers)

            async def serve() -> None:
                check_version(version)  # before what another one may have written
                engine_config = EngineConfig.from_json(config)
                set_up_logging(engine_config.log_format, "engine")
                make = partial(make_engine, engine_config, followers=actors)
                await run_engine(make, at, never, token, opened, lease, exporter_of(engine_config, at))

            why = run_and_report(lambda: asyncio.run(serve()))
            self._why = why if listen else f"on node {node}: {why}"
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


class FollowerActor:
    """A rank that follows; its one call runs as long as the group does."""

    def run(self, version: str, config: str, rank: int, size: int, address: str, token: bytes) -> str:
        """Why it ended. version: as in `EngineActor.start`."""
        die_with_parent()
        set_up_logging()
        from rpc.engines.follower import run_follower

        def lost(why: str) -> None:
            logging.getLogger("quire.cluster").warning("rank %d: %s", rank, why)
            os._exit(1)  # the other thread may wait for a sum that never comes

        def follow() -> None:
            check_version(version)
            engine_config = EngineConfig.from_json(config)
            set_up_logging(engine_config.log_format, "engine", rank)
            with suppress(RankLost):  # rank 0 says why
                run_follower(engine_config, rank, size, address, token, lost)

        why = run_and_report(follow)
        leave = threading.Timer(LAST_WORDS, os._exit, (1,))  # nobody may be there to end this process
        leave.daemon = True
        leave.start()
        return why


class FollowerActors:
    """`Followers` that are actors."""

    def __init__(self, listen_on: str, actors: Sequence[Any], config: EngineConfig) -> None:
        self._actors, self._config = actors, config
        self.listen_on = listen_on
        self._calls: list[Any] = []

    def start(self, address: str, token: bytes) -> None:
        size, config = self._config.model.tensor_parallel, self._config.to_json()
        self._calls = [
            actor.run.remote(own_version(), config, rank, size, address, token)
            for rank, actor in enumerate(self._actors, 1)
        ]

    def ended(self) -> str:
        import ray

        done, _ = ray.wait(self._calls, timeout=0) if self._calls else ((), ())
        for call in done:
            rank = self._calls.index(call) + 1
            try:
                return f"rank {rank} ended before it was ready: {ray.get(call)}"
            except ray.exceptions.RayError as error:
                return f"the actor of rank {rank} has died: {last_line(error)}"
        return ""

    def close(self, grace: float) -> None:
        """Whoever placed them ends what does not end with rank 0."""


def check_version(version: str) -> None:
    """Raises ValueError where another Quire is installed here than the server's."""
    here = own_version()
    if here != version:
        raise ValueError(f"Quire {here} is installed here, and the server's is {version}: all nodes need the same")


def last_line(error: Exception) -> str:
    """Of what Ray says of a death: the cause."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
