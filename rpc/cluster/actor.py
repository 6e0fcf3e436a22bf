"""The Ray actors of an engine: one hosts it and is rank 0 of its rank group, the others are the followers."""

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

REPORT_SECONDS = 5.0  # life of an actor after its engine's end, in which the driver reads the reason


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
        """Starts to serve the engine link, in a thread; returns before the model is loaded.

        Args:
            version: Version of the server's Quire.
            config: Configuration of the engine, as JSON.
            listen: Address of the link, unix:PATH; "": a free port of this node's address.
            token: See `run_engine`.
            lease: See `run_engine`.
            followers: Actors of ranks 1 and up.
            apart: The followers may be on other nodes.

        Returns:
            Address of the link; "" where the engine does not start.
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
            never = asyncio.Event()  # never set: an engine in a cluster ends with its actor, which Ray kills
            actors = partial(FollowerActors, host_port(node, 0) if apart else new_local(), followers)

            async def serve() -> None:
                check_version(version)  # first, since another version may have written the configuration otherwise
                engine_config = EngineConfig.from_json(config)
                set_up_logging(engine_config.log_format, "engine")
                make = partial(make_engine, engine_config, followers=actors)
                await run_engine(make, at, never, token, opened, lease, exporter_of(engine_config, at))

            why = run_and_report(lambda: asyncio.run(serve()))
            self._why = why if listen else f"on node {node}: {why}"
            bound.set()
            self._ended.set()
            time.sleep(REPORT_SECONDS)  # the driver reads why, and ends this process, if it can be reached
            os._exit(1)

        self._ended = threading.Event()
        threading.Thread(target=run, name="quire-link", daemon=True).start()
        bound.wait()
        return self._address

    def wait(self) -> str:
        """Waits for the engine's end, and returns why it did not start or has failed."""
        self._ended.wait()
        return self._why


class FollowerActor:
    """A follower as an actor; its one call runs as long as the rank group does."""

    def run(self, version: str, config: str, rank: int, size: int, address: str, token: bytes) -> str:
        """Runs the follower to its end, and returns why it ended.

        Args:
            version: Version of the server's Quire.
            config: Configuration of the engine, as JSON.
            rank: See `run_follower`.
            size: See `run_follower`.
            address: See `run_follower`.
            token: See `run_follower`.
        """
        die_with_parent()
        set_up_logging()
        from rpc.engines.follower import run_follower

        def lost(why: str) -> None:
            logging.getLogger("quire.cluster").warning("rank %d: %s", rank, why)
            os._exit(1)  # the other thread may wait in a collective for a rank that is gone

        def follow() -> None:
            check_version(version)
            engine_config = EngineConfig.from_json(config)
            set_up_logging(engine_config.log_format, "engine", rank)
            with suppress(RankLost):  # rank 0 says why
                run_follower(engine_config, rank, size, address, token, lost)

        why = run_and_report(follow)
        leave = threading.Timer(REPORT_SECONDS, os._exit, (1,))  # the driver, which ends this process, may be gone
        leave.daemon = True
        leave.start()
        return why


class FollowerActors:
    """`Followers` that are actors.

    Args:
        listen_on: Address on which rank 0 is to listen for them.
        actors: Actors of ranks 1 and up, in order.
        config: Configuration of the engine.
    """

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
        """Does nothing: the driver, which placed the actors, ends those that do not end with rank 0."""


def check_version(version: str) -> None:
    """Raises ValueError where another Quire is installed here than the server's."""
    here = own_version()
    if here != version:
        raise ValueError(f"Quire {here} is installed here, and the server's is {version}: all nodes need the same")


def last_line(error: Exception) -> str:
    """Returns the last line of an error of Ray's, which has the cause of a death."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
