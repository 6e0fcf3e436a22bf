"""An engine in this process, as frontends and the link see one."""

from rpc.frontend.engine_client import EngineInfo
from scheduler.engine import Engine, Sink
from scheduler.scheduler import Scheduler
from scheduler.step import Executor


class LocalEngine(Engine):
    """An `EngineClient` with its thread. info: what it tells frontends that it is."""

    def __init__(self, scheduler: Scheduler, executor: Executor, info: EngineInfo, sink: Sink) -> None:
        super().__init__(scheduler, executor, sink)
        self.info = info
        self.place = "a thread of the server"
