"""Where the rooms meet: a loaded model, a scheduler and an engine around them. Imports torch."""

from dataclasses import dataclass

import torch

from model.loading import LoadedModel, load
from model.overlapped import Overlapped
from rpc.engines.local import LocalEngine
from rpc.frontend.engine_client import EngineInfo
from rpc.paths import model_directory
from rpc.settings import EngineConfig
from scheduler.engine import Sink
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What `assemble` makes."""

    loaded: LoadedModel
    scheduler: Scheduler

    def engine(self, sink: Sink) -> LocalEngine:
        """The engine, not started. `sink` gets each step's outputs on the engine's thread."""
        loaded, runner = self.loaded, self.loaded.runner
        executor = Overlapped(runner) if self.scheduler.settings.steps_in_flight > 1 else runner
        info = EngineInfo(loaded.limits, loaded.pages, loaded.dtype, loaded.device)
        return LocalEngine(self.scheduler, executor, info, sink)


def assemble(config: EngineConfig) -> Parts:
    """Loads everything. Raises CheckpointError or ValueError with one clear message."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    directory = model_directory(config.model.model)
    loaded = load(directory, config.model, config.scheduler.max_sequences, config.request)
    return Parts(loaded, Scheduler(config.scheduler, config.queue, loaded.layout, loaded.pages))
