"""Runs a `quire serve` as the child of an actor, with engines in the actor's Ray cluster."""

import asyncio
import logging
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress

log = logging.getLogger("quire.cluster")

READY = re.compile(r"ready: .* gRPC ([^\s,]+),")
# The server ends with its parent, however that ends; its engines end with the server.
LAUNCH = "from rpc.engines.reaping import die_with_parent; die_with_parent(); from rpc.cli.main import main; main()"
OWN_FLAGS = ("host", "port", "tls-cert", "tls-key", "tls-client-ca", "engine", "ray", "ray-address")
STOP_SECONDS = 20.0  # time after which a server that does not end is killed


class ServerSidecar:
    """A running server on loopback, from `start` to `stop`.

    Attributes:
        address: HOST:PORT of its gRPC port.
    """

    def __init__(self, process: Process, address: str) -> None:
        self._process, self.address = process, address
        # An unread pipe would fill, and block the server's output.
        self._reading = asyncio.create_task(_read_on(process))

    @staticmethod
    async def start(ray_address: str, flags: Mapping[str, str]) -> "ServerSidecar":
        """Starts a server, and waits until it takes requests.

        Args:
            ray_address: HOST:PORT of the cluster whose node this is.
            flags: Flag of `quire serve` without its dashes, to its value; "true" for flags without one.

        Raises:
            ValueError: A flag that this class sets itself.
            RuntimeError: The server ended before it was ready; its standard error says why.
        """
        command = [sys.executable, "-P", "-c", LAUNCH, *command_of(ray_address, flags)]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        try:
            line = (await process.stdout.readline()).decode(errors="replace")
            found = READY.search(line)
            if found is None:
                code = await process.wait()
                raise RuntimeError(f"quire serve ended with code {code} before it was ready; the log above says why")
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        log.info("%s", line.strip().removeprefix("quire: "))
        return ServerSidecar(process, found[1])

    def check(self) -> None:
        """Raises RuntimeError if the server has ended."""
        if self._process.returncode is not None:
            raise RuntimeError(f"quire serve has ended with code {self._process.returncode}")

    async def stop(self) -> None:
        """Lets the server drain, and kills it after `STOP_SECONDS`."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            log.warning("quire serve did not end within %g s and is killed", STOP_SECONDS)
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._reading


def command_of(ray_address: str, flags: Mapping[str, str]) -> Sequence[str]:
    """Returns the arguments of `quire`. Raises ValueError for flags that are set here."""
    if taken := [name for name in flags if name in OWN_FLAGS]:
        raise ValueError(f"{taken[0]} cannot be given: a server beside a Serve replica has plain text on loopback")
    given = {"metrics-port": "0", "admin-port": "0"} | dict(flags)
    own = [f"--ray-address={ray_address}", "--host=127.0.0.1", "--port=0"]
    return ["serve", *own, *(f"--{name}" if value == "true" else f"--{name}={value}" for name, value in given.items())]


async def _read_on(process: Process) -> None:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    while await process.stdout.read(2**16):
        pass
