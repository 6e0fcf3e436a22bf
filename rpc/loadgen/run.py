"""One load, from its settings to what came of it."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rpc.loadgen.corpus import plays
from rpc.loadgen.drive import Drive, Run
from rpc.loadgen.plan import Plan
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.wire import Served, Wire

WARM_UP_TOGETHER = 8
LOOK = 0.5  # seconds between two looks at how far it is; a look costs the event loop time

Ready = Callable[[Plan, Served, bool], None]
"""Called once it is known what the load is, before its first request. The last one: prompts have exact lengths."""


async def run_load(wire: Wire, settings: LoadSettings, ready: Ready, look: Callable[[Run], None]) -> Run:
    """Closes `wire`. A first SIGINT ends the load with what there is. Raises Failed where the server cannot be used,
    ValueError, OSError.
    """
    try:
        served = await wire.find()
        corpus = await wire.corpus(plays())
        plan = Plan(settings, corpus, served.context)
        ready(plan, served, corpus.exact)
        together = settings.together
        drive = Drive(wire.send, settings.timeout, scheduled=together is None)
        drive.run.exact = corpus.exact
        if settings.warm_up:
            warm = Drive(wire.send, settings.timeout, scheduled=False)
            with _stopped_by_person(warm):
                await warm.closed(plan.warm_up(), min(together or WARM_UP_TOGETHER, settings.warm_up))
            drive.run.warm_up = warm.run.seen
            if warm.run.stopped:
                drive.stop()
                return drive.run
        looking = asyncio.create_task(_look(drive.run, look))
        with _stopped_by_person(drive):
            if together is None:
                await drive.open(plan.requests(), settings.duration)
            else:
                await drive.closed(plan.requests(), together, settings.duration)
        looking.cancel()
        look(drive.run)
        return drive.run
    finally:
        await wire.close()


async def _look(run: Run, look: Callable[[Run], None]) -> None:
    while True:
        await asyncio.sleep(LOOK)
        look(run)


@contextmanager
def _stopped_by_person(drive: Drive) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError):  # no signals here: the person's interrupt ends all of it
        loop.add_signal_handler(signal.SIGINT, drive.stop)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
