"""An engine in this process whose model is divided among ranks, and the processes of its followers."""

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import psutil
import torch

from model.settings import ModelSettings
from rpc.engines import group
from rpc.engines.assembly import EngineParts, assemble
from rpc.engines.local import LocalEngine
from rpc.frontend.prepare import Preparer, load_preparer
from rpc.settings import EngineConfig
from scheduler.events import EndReason, StepOutputs, Submit
from scheduler.settings import SchedulerSettings
from scheduler.spec import Spec
from tests.support.processes import is_alive, temporary_directory, wait_until

CONFIG = EngineConfig(
    model=ModelSettings(dtype="float32", kv_cache_memory=2**21, page_size=4, tensor_parallel_timeout=2.0),
    scheduler=SchedulerSettings(max_batched_tokens=64, max_sequences=16),
)
FOLLOWER = "rpc.engines.follower_process"
NAMES = ("quire-ranks", "quire-followers")


def config_of(ranks: int, **scheduling: object) -> EngineConfig:
    scheduler = replace(CONFIG.scheduler, **scheduling)  # type: ignore[arg-type]
    return replace(CONFIG, model=replace(CONFIG.model, tensor_parallel=ranks), scheduler=scheduler)


class Running:
    """An engine that runs, what came out of it, and the processes of its other ranks."""

    def __init__(self, parts: EngineParts, preparer: Preparer) -> None:
        self.outputs: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()
        self.engine: LocalEngine = parts.engine(self.outputs.put)
        self.followers = followers_of(os.getpid())
        self._preparer, self.parts = preparer, parts
        self.engine.start()

    def send(self, specs: Sequence[Spec]) -> None:
        limits = self.engine.info.limits
        self.engine.send([Submit(i, self._preparer.prepare(spec, limits)) for i, spec in enumerate(specs)])

    def tokens(self, specs: Sequence[Spec]) -> dict[tuple[int, int], list[int]]:
        """Returns the tokens of each sequence, and of each hypothesis that a search found."""
        self.send(specs)
        tokens: dict[tuple[int, int], list[int]] = {}
        ended = 0
        while ended < len(specs):
            step = self.outputs.get(timeout=60)
            for attempt, index, token in zip(
                step.attempts.tolist(), step.indices.tolist(), step.tokens.tolist(), strict=True
            ):
                tokens.setdefault((attempt, index), []).append(token)
            for end in step.ends:
                assert end.reason is not EndReason.ENGINE_FAILED, end.message
                ended += not end.more
        return tokens

    def failure(self) -> str:
        """Returns the failure of the first request that is told of one."""
        while True:
            for end in self.outputs.get(timeout=30).ends:
                assert end.reason is EndReason.ENGINE_FAILED
                return end.message


def followers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if is_alive(child) and FOLLOWER in child.cmdline()]


class Apart(group.FollowerProcesses):
    """As if they ran on other machines."""

    @property
    def listen_on(self) -> str:
        return "127.0.0.1:0"


@contextmanager
def running(
    config: EngineConfig, followers: type[group.FollowerProcesses] = group.FollowerProcesses
) -> Iterator[Running]:
    """Afterwards nothing of it may be left."""
    others = {thread for thread in threading.enumerate() if thread.name in NAMES}
    threads = torch.get_num_threads()
    with temporary_directory():
        made = Running(assemble(config, followers), load_preparer(config.model))
        try:
            assert len(made.followers) == config.model.tensor_parallel - 1
            yield made
        finally:
            made.engine.stop()
            torch.set_num_threads(threads)
        wait_until(lambda: not any(map(is_alive, made.followers)), "the end of all followers", 5)
        own = lambda: {t for t in threading.enumerate() if t.name in NAMES} - others  # noqa: E731
        wait_until(lambda: not own(), "the end of their threads", 5)
