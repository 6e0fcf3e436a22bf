"""Ways to start an engine's process: forked by a process that has imported torch, or as a new interpreter."""

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from typing import Protocol

from rpc.engines.forks import ForkError, ForkOrder, ForkServer

log = logging.getLogger("quire.engines")

MODULE = "rpc.engines.engine_process"
PRELOADED = ("rpc.engines.assembly", "model.cpu.backend", MODULE)
"""Modules that a fork server imports: torch, and all that an engine on a CPU imports while it starts."""
SIMULATED = ("rpc.engines.simulated", MODULE)
"""The same of a simulated engine, without torch."""


class EngineProcess(Protocol):
    """An engine's process, the leader of a session. `stdin` and `stdout` are its standard input and output."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> asyncio.StreamWriter | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int:
        """Waits for its end. Returns its exit code, a signal's number negated."""


class Launcher(Protocol):
    """Starts processes of engines; shared by the places of a server."""

    async def start(self, address: str, environment: Mapping[str, str]) -> EngineProcess:
        """Starts `rpc.engines.engine_process` for a link at the address. A cancelled call leaves no process.

        Args:
            address: Address of the link.
            environment: Variables beside those of this process.

        Raises:
            OSError: The process cannot be started.
        """

    async def close(self) -> None:
        """Ends the launcher's own processes, not those that it started. A second call does nothing."""


class Spawner:
    """Starts a new interpreter for each engine, which imports torch itself: 2 s of a processor."""

    async def start(self, address: str, environment: Mapping[str, str]) -> EngineProcess:
        command = (sys.executable, "-P", "-m", MODULE, address)
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=os.environ | environment
        )

    async def close(self) -> None:
        """Does nothing, since there is no process of its own."""


class Forker:
    """Has engines forked by a fork server, which starts with the first engine and again after its own end.

    If a fork server does not become ready, say because an import starts a thread, engines are spawned from then on.

    Args:
        modules: Modules that it imports first; None: `PRELOADED`.
    """

    def __init__(self, modules: Sequence[str] | None = None) -> None:
        self._modules = modules
        self._server: ForkServer | None = None
        self._one_at_a_time = asyncio.Lock()  # places that start together share one fork server
        self._can_fork = True

    async def start(self, address: str, environment: Mapping[str, str]) -> EngineProcess:
        async with self._one_at_a_time:
            if self._can_fork and (self._server is None or not self._server.is_alive):
                await self._start_server()
        if not self._can_fork or self._server is None:
            return await Spawner().start(address, environment)
        forking = asyncio.ensure_future(asyncio.to_thread(_fork, self._server, address, environment))
        try:
            pid, connection = await asyncio.shield(forking)
        except asyncio.CancelledError:
            await asyncio.wait((forking,))  # milliseconds: the process has to be known before it can be ended
            if forking.exception() is None:
                await asyncio.to_thread(_discard, *forking.result())
            raise
        try:
            streams = await asyncio.open_connection(sock=connection)
        except BaseException:
            await asyncio.to_thread(_discard, pid, connection)
            raise
        return ForkedProcess(pid, *streams)

    async def _start_server(self) -> None:
        if self._server is not None:
            log.warning("the fork server has ended: starting another one")
            await self.close()
        self._server = ForkServer(PRELOADED if self._modules is None else self._modules)
        try:
            await asyncio.to_thread(self._server.wait_ready)
        except ForkError as error:
            log.warning("engines are started without a fork server, which takes longer: %s", error)
            self._can_fork = False
            await self.close()

    async def close(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.close)


class ForkedProcess:
    """`EngineProcess` that a fork server forked, a child of this process. Lives on the loop that made it.

    Args:
        pid: Id of the process.
        stdout: Reader of the socket that is its standard input and output.
        stdin: Writer of the same socket.
    """

    def __init__(self, pid: int, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = loop.create_future()
        self._handle = os.pidfd_open(pid)
        loop.add_reader(self._handle, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self._code.set_result(_reap(self.pid))

    async def wait(self) -> int:
        return await asyncio.shield(self._code)


def fork_order(address: str, environment: Mapping[str, str]) -> ForkOrder:
    """Returns what a fork server is told, see `Launcher.start`."""
    command = (sys.executable, "-P", "-m", MODULE, address)
    return ForkOrder(MODULE, command[3:], command, {**os.environ, **environment}, os.getcwd())


def _fork(server: ForkServer, address: str, environment: Mapping[str, str]) -> tuple[int, socket.socket]:
    """Has a process forked. Blocks.

    Returns:
        The process's id, and the other end of the socket that is its standard input and output.

    Raises:
        OSError: The process cannot be forked.
    """
    ours, theirs = socket.socketpair()
    order = fork_order(address, environment)
    try:
        with theirs:
            return server.fork(order, theirs.fileno(), theirs.fileno(), 2), ours
    except BaseException:
        ours.close()
        raise


def _discard(pid: int, connection: socket.socket) -> None:
    connection.close()
    os.kill(pid, signal.SIGKILL)
    _reap(pid)


def _reap(pid: int) -> int:
    """Waits for a child's end. Returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
