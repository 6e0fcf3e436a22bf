"""An engine in this process, as frontends and the engine link see it."""

from collections.abc import Callable

from rpc.frontend.engine_client import EngineInfo, Reach
from rpc.link.pages import PagePort
from scheduler.engine import Engine, Sink
from scheduler.readiness import Readiness
from scheduler.scheduler import Scheduler
from scheduler.step import Executor


class LocalEngine(Engine):
    """An `Engine` with its thread that is its own `EngineClient`.

    Attributes:
        info: Fixed properties of the engine, for frontends.
        place: Process or machine that it runs on, for people.
        reach: None: only this process reaches it, unless it is served on a link.
        pages: Its KV pages, for other engines; None where they cannot be copied.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        sink: Sink,
        last_excuse: Callable[[], float] = lambda: 0.0,
        readiness: Readiness | None = None,
        senders_help: bool = True,
    ) -> None:
        super().__init__(
            scheduler, executor, sink, last_excuse=last_excuse, readiness=readiness, senders_help=senders_help
        )
        self.info = info
        self.place = "a thread of the server"
        self.reach: Reach | None = None
        self.pages: PagePort | None = None
