"""Runs one load, from its settings to its result."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rpc.loadgen.corpus import plays
from rpc.loadgen.drive import Drive, LoadRun
from rpc.loadgen.plan import RequestPlan
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.wire import ServedModel, Wire

WARM_UP_TOGETHER = 8
LOOK = 0.5  # seconds between two reports of progress, which cost the event loop time

Ready = Callable[[RequestPlan, ServedModel, bool], None]
"""Called before the first request, with the plan, the model, and whether prompts have exact lengths."""


async def run_load(wire: Wire, settings: LoadSettings, ready: Ready, look: Callable[[LoadRun], None]) -> LoadRun:
    """Runs a load, and closes `wire`. A first SIGINT ends the load early, with the result so far.

    Args:
        wire: Client of the server.
        settings: Settings of the load.
        ready: Called before the first request.
        look: Called with the progress, and at the end.

    Raises:
        Failed: The server cannot be used.
        ValueError: Requests cannot fit, or the trace is wrong.
        OSError: The trace cannot be read.
    """
    try:
        served = await wire.find()
        corpus = await wire.corpus(plays())
        plan = RequestPlan(settings, corpus, served.context)
        ready(plan, served, corpus.exact)
        together = settings.together
        drive = Drive(wire.send, settings.timeout, scheduled=together is None)
        drive.run.exact = corpus.exact
        if settings.warm_up:
            warm = Drive(wire.send, settings.timeout, scheduled=False)
            with _stopped_by_person(warm):
                await warm.run_closed(plan.warm_up(), min(together or WARM_UP_TOGETHER, settings.warm_up))
            drive.run.warm_up = warm.run.seen
            if warm.run.stopped:
                drive.stop()
                return drive.run
        looking = asyncio.create_task(_look(drive.run, look))
        with _stopped_by_person(drive):
            if together is None:
                await drive.run_open(plan.requests(), settings.duration)
            else:
                await drive.run_closed(plan.requests(), together, settings.duration)
        looking.cancel()
        look(drive.run)
        return drive.run
    finally:
        await wire.close()


async def _look(run: LoadRun, look: Callable[[LoadRun], None]) -> None:
    while True:
        await asyncio.sleep(LOOK)
        look(run)


@contextmanager
def _stopped_by_person(drive: Drive) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError):  # no signals on this platform: an interrupt ends the program
        loop.add_signal_handler(signal.SIGINT, drive.stop)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
