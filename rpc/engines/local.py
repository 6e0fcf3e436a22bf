"""An engine in this process, as frontends and the link see one."""

from collections.abc import Callable

from rpc.frontend.engine_client import EngineInfo, Reach
from rpc.link.pages import PagePort
from scheduler.engine import Engine, Sink
from scheduler.scheduler import Scheduler
from scheduler.step import Executor


class LocalEngine(Engine):
    """An `EngineClient` with its thread. info: what it tells frontends that it is. last_excuse: as in `Engine`. pages:
    for other engines; None where they can have none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        sink: Sink,
        last_excuse: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(scheduler, executor, sink, last_excuse=last_excuse)
        self.info = info
        self.place = "a thread of the server"
        self.reach: Reach | None = None
        self.pages: PagePort | None = None
