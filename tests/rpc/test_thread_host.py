"""An engine on a thread of the server dies of its device: a new one is loaded, and its requests go on there."""

import asyncio
import gc
import sys
import weakref

import pytest

from model.attention.backend import AttentionBackend
from model.runner import Runner
from model.settings import ModelSettings
from rpc.engines.assembly import EngineParts, assemble
from rpc.engines.supervisor import Supervisor
from rpc.engines.thread import SWITCH_INTERVAL, ThreadHost
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import load_preparer
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.stream import RequestStream
from rpc.observe.metrics import Metrics
from rpc.settings import EngineConfig
from scheduler.parameters import Sampling, Stopping
from scheduler.spec import Spec
from scheduler.step import StepPlan

SPEC = Spec("ROMEO:", sampling=Sampling(temperature=0.0), stopping=Stopping(max_tokens=20, ignore_eos=True))


async def run_to_its_end(frontend: Frontend, name: str) -> RequestStream:
    async with asyncio.timeout(60), frontend.open(SPEC, name, None, streaming=False) as live:
        while not live.stream.ended:
            await live.wait()
        return live.stream


async def test_engine_whose_device_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, broken = Runner.launch, [False]
    # pytest keeps what is logged, a logged trace its frames, and those the engine.
    monkeypatch.setattr("scheduler.engine.log.exception", lambda *arguments: None)

    def fail_once(self: Runner, plan: StepPlan) -> None:
        if broken[0]:
            broken[0] = False
            raise RuntimeError("the device is gone")
        launch(self, plan)

    pools, held = list[weakref.ref[AttentionBackend]](), list[list[AttentionBackend | None]]()

    def note_pools(config: EngineConfig) -> EngineParts:
        held.append([pool() for pool in pools])
        parts = assemble(config)
        pools.append(weakref.ref(parts.loaded.runner.attention))
        return parts

    monkeypatch.setattr("rpc.engines.assembly.assemble", note_pools)
    config = EngineConfig(model=ModelSettings(kv_cache_memory=2**20))
    preparer = load_preparer(config.model)
    frontend = Frontend(preparer, FrontendSettings(), Metrics("m"))
    supervisor = Supervisor([ThreadHost(config)], frontend)
    await supervisor.start()
    assert gc.get_freeze_count() > 100_000, "torch is there, and stops no thread for a full collection"
    assert sys.getswitchinterval() == SWITCH_INTERVAL, "the engine does not wait 5 ms for a busy event loop"
    first = frontend.replicas.get(0).client
    (before,) = (await run_to_its_end(frontend, "a")).take()
    monkeypatch.setattr(Runner, "launch", fail_once)
    broken[0] = True
    assert (await run_to_its_end(frontend, "b")).take() == [before]
    assert first is not frontend.replicas.get(0).client
    assert held == [[], [None]], "the dead engine's KV pool is still there while the next one is loaded"
    await supervisor.stop()
    frontend.shutdown()
