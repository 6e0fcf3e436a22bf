"""The process of an engine, which ends with its parent in any case. `rpc.engines.process` describes how it starts."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from grpc import aio
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from model.errors import CheckpointError
from model.simulated.naming import is_simulated
from rpc.engines.local import LocalEngine
from rpc.engines.reaping import die_with_parent
from rpc.heap import freeze_heap
from rpc.link import CHANNEL_OPTIONS, LISTENING
from rpc.link.server import LinkService
from rpc.observe.logs import set_up_logging
from rpc.paths import model_directory, model_name
from rpc.settings import EngineConfig
from scheduler.engine import Sink

if TYPE_CHECKING:
    from rpc.engines.group import Followers
    from rpc.observe.exporter import EngineExporter

log = logging.getLogger("quire.engines")


class EngineFailedError(RuntimeError):
    """The engine of this process has died; the message has the cause."""


def make_engine(
    config: EngineConfig, sink: Sink, followers: "Callable[[EngineConfig], Followers] | None" = None
) -> LocalEngine:
    """Loads a model, and returns its engine, not started.

    Args:
        config: Configuration of the engine.
        sink: Gets each step's outputs.
        followers: Makes the other ranks of the engine; None: processes of this machine.

    Raises:
        CheckpointError: The model's files cannot be used.
        ValueError: The configuration does not fit the model or the machine.
    """
    if is_simulated(config.model.model):
        from rpc.engines.simulated import make_simulated

        freeze_heap()
        return make_simulated(config, sink)
    from rpc.engines.assembly import assemble  # here, since it imports torch: Ray's driver, too, imports this module

    freeze_heap()
    return (assemble(config) if followers is None else assemble(config, followers)).engine(sink)


async def run_engine(
    make: Callable[[Sink], LocalEngine],
    listen: str,
    stop: asyncio.Event,
    token: str = "",
    opened: Callable[[str], None] | None = None,
    lease: float | None = None,
    exporter: "EngineExporter | None" = None,
) -> None:
    """Serves an engine on the engine link, until `stop` is set.

    Args:
        make: Makes the engine, in a thread.
        listen: Address of the link as gRPC writes it; port 0 takes a free port.
        stop: Ends the engine.
        token: Secret that a frontend has to prove.
        opened: Called with the address of the link, before the engine is made.
        lease: Seconds without a frontend after which the engine ends. On another machine it may be all that is left of
            its server. None: it never ends for that.
        exporter: Serves the engine's own metrics.

    Raises:
        OSError: The link cannot listen.
        EngineFailedError: The engine has failed, or its lease is over.
        Exception: Any exception of `make`.
    """
    server = aio.server(options=[*CHANNEL_OPTIONS, *LISTENING])
    service = LinkService(token) if exporter is None else LinkService(token, exporter.step)
    pb_grpc.add_EngineServiceServicer_to_server(service, server)
    address = _open_link(server, listen)
    await server.start()
    if opened is not None:
        opened(address)
    try:
        engine = await asyncio.to_thread(make, service.sink)
    except BaseException:
        service.abandon()
        await server.stop(grace=1.0)
        raise
    if exporter is not None:
        engine.info = replace(engine.info, metrics=exporter.address)
        exporter.attached(engine.info.pages, engine.info.page_size)
    engine.start()
    service.attach(engine, engine.pages)
    failed = asyncio.create_task(service.wait_failure())
    abandoned = asyncio.create_task(service.wait_without_frontend(lease))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((failed, abandoned, stopped), return_when=asyncio.FIRST_COMPLETED)
    why = engine.failure if failed.done() else None
    if why is None:
        await asyncio.to_thread(engine.stop)
    await server.stop(grace=1.0)
    for task in (failed, abandoned, stopped):
        task.cancel()
    if why is not None:
        raise EngineFailedError(why)
    if abandoned.done() and not abandoned.cancelled():
        raise EngineFailedError(f"no frontend was connected for {lease:g} s")


def _open_link(server: aio.Server, listen: str) -> str:
    """Opens the address of the link, and returns it with the port that the server got. Raises OSError."""
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"the engine link cannot listen on {listen}: {error}") from None
    return listen if listen.startswith("unix") else f"{listen.rpartition(':')[0]}:{port}"


def run_and_report(run: Callable[[], None]) -> str:
    """Runs a function. Returns the error that ended it as one line, "" where none did; logs an unexpected one."""
    try:
        run()
    except (CheckpointError, ValueError, OSError, MemoryError, EngineFailedError) as error:
        return " ".join(str(error).split())
    except Exception as error:
        log.exception("the engine's process failed")
        return f"the engine's process failed: {type(error).__name__}: {error}"
    return ""


def read_line() -> str:
    """Returns a line of standard input, which stays open.

    Raises:
        EOFError: The input ended first.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # no buffer: the end of the input is watched for on the file descriptor
        if not byte:
            raise EOFError("standard input ended within a line")
        line += byte
    return line.decode().removesuffix("\n")


def take_standard_output() -> int:
    """Sends later prints to standard error, and returns a descriptor of the real standard output."""
    report = os.dup(1)
    os.dup2(2, 1)
    return report


def ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM. A terminal sends them to engines too, but the server drains before it ends these."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def exporter_of(config: EngineConfig, listen: str) -> "EngineExporter | None":
    """Returns the exporter of the engine's metrics on the host that the link listens on; None if they are off.

    Raises:
        OSError: The exporter cannot listen.
    """
    if not config.shows_metrics:
        return None
    from rpc.observe.exporter import EngineExporter

    name = config.model.served_model_name or model_name(config.model.model, model_directory(config.model.model))
    host = "127.0.0.1" if listen.startswith("unix") else listen.rpartition(":")[0].strip("[]")
    return EngineExporter(name, host)


async def _main(config: EngineConfig, token: str, listen: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def parent_has_closed() -> None:
        loop.remove_reader(0)
        stop.set()

    loop.add_reader(0, parent_has_closed)
    exporter = exporter_of(config, listen)
    await run_engine(partial(make_engine, config), listen, stop, token, exporter=exporter)


def main() -> None:
    die_with_parent()
    ignore_signals()
    report = take_standard_output()
    set_up_logging()
    try:
        config, token = EngineConfig.from_json(read_line()), read_line()
    except EOFError:
        os._exit(1)  # the server stopped while it started this engine, and reads no reason
    set_up_logging(config.log_format, "engine")
    why = run_and_report(lambda: asyncio.run(_main(config, token, sys.argv[1])))
    os.write(report, why.encode())
    sys.stderr.flush()
    os._exit(1 if why else 0)  # a thread of the model may hang


if __name__ == "__main__":
    main()
