"""Where the rooms meet: a loaded model, a scheduler and an engine around them."""

from dataclasses import dataclass
from pathlib import Path

from model.inputs.tokenizer import Tokenizer
from model.loading import LoadedModel, load
from model.overlapped import Overlapped
from rpc.frontend.prepare import Preparer
from rpc.paths import model_directory, model_name
from rpc.settings import ServerSettings
from scheduler.engine import Engine, Sink
from scheduler.request import Limits
from scheduler.scheduler import Scheduler


class LocalEngine(Engine):
    """An engine in this process, as an `EngineClient`."""

    def __init__(self, scheduler: Scheduler, loaded: LoadedModel, sink: Sink) -> None:
        overlap = scheduler.settings.steps_in_flight > 1
        super().__init__(scheduler, Overlapped(loaded.runner) if overlap else loaded.runner, sink)
        self.limits: Limits = loaded.limits


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What `assemble` makes ready before a port opens."""

    directory: Path
    loaded: LoadedModel
    preparer: Preparer
    scheduler: Scheduler

    def engine(self, sink: Sink) -> LocalEngine:
        """The engine, not started. `sink` gets each step's outputs on the engine's thread."""
        return LocalEngine(self.scheduler, self.loaded, sink)


def assemble(settings: ServerSettings) -> Parts:
    """Loads everything. Raises CheckpointError or ValueError with one clear message."""
    directory = model_directory(settings.model.model)
    tokenizer = Tokenizer.load(directory)
    loaded = load(directory, settings.model, settings.scheduler.max_sequences, settings.request)
    name = settings.model.served_model_name or model_name(settings.model.model, directory)
    preparer = Preparer(name, tokenizer, loaded.limits, loaded.defaults)
    scheduler = Scheduler(settings.scheduler, settings.queue, loaded.layout, loaded.pages)
    return Parts(directory, loaded, preparer, scheduler)
