"""`--devices` gives each engine its GPU, and refuses one that the machine has not."""

import asyncio
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from model.settings import ModelSettings
from rpc.engines.gpus import visible_gpus
from rpc.engines.launchers import Spawner
from rpc.engines.process import ProcessHost
from rpc.hosts import choose_hosts
from rpc.settings import EngineSettings, ServerSettings
from scheduler.controls import Controls
from scheduler.events import EndReason, StepOutputs, Submit
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from tests.model.gpu.device.engine import NEAR, NEW, PROMPTS, Oracle
from tests.model.gpu.device.place import BACKEND, DEVICE, REHEARSED, needs_cuda
from tests.support.engines import Result

SECONDS = 120.0


@pytest.fixture(autouse=True)
def _without_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's settings ask for the library of structured output, of which nothing is used here."""
    monkeypatch.setattr("rpc.frontend.settings.check_backend", lambda _: None)


def settings(directory: Path, engines: EngineSettings) -> ServerSettings:
    model = ModelSettings(str(directory), device=DEVICE, backend=BACKEND, kv_cache_memory=2**26)
    scheduling = SchedulerSettings(max_sequences=6, max_batched_tokens=128)
    return ServerSettings(model=model, scheduler=scheduling, engine=engines)


@needs_cuda
def test_a_gpu_that_is_not_there_is_refused(dense: Path) -> None:
    visible = visible_gpus()
    assert len(visible) == torch.cuda.device_count(), f"the server sees {visible}"
    missing = next(number for number in count() if str(number) not in visible)
    devices = f"{visible[0]};{missing}"
    with pytest.raises(ValueError, match=rf"--devices names GPU {missing}, there are {', '.join(visible)}$"):
        choose_hosts(settings(dense, EngineSettings(replicas=2, devices=devices)), bytes(32))


@needs_cuda
def test_devices_for_more_engines_than_there_are_are_refused(dense: Path) -> None:
    first = visible_gpus()[0]
    with pytest.raises(ValueError, match=r"which is for 2 engines: --replicas is 1"):
        choose_hosts(settings(dense, EngineSettings(devices=f"{first};{first}")), bytes(32))


async def serve(host: ProcessHost) -> tuple[str, dict[int, Result]]:
    """Runs the prompts in an engine's process. Returns its device, and the results."""
    arrived, results = asyncio.Event(), {number: Result() for number in range(len(PROMPTS))}
    loop = asyncio.get_running_loop()

    def take(outputs: StepOutputs) -> None:
        for at, attempt in enumerate(outputs.attempts.tolist()):
            results[attempt].tokens.append(int(outputs.tokens[at]))
            results[attempt].logprobs.append(float(outputs.logprobs.chosen[at]))
        for end in outputs.ends:
            results[end.attempt].end = end
        loop.call_soon_threadsafe(arrived.set)

    async with asyncio.timeout(SECONDS):
        await host.prepare()
        client = await host.launch(take)
        try:
            greedy = Controls(0.0, 1.0, 0, 0.0, 0, 0)
            client.send([
                Submit(number, Request(np.array(prompt, np.int32), NEW, (), greedy))
                for number, prompt in enumerate(PROMPTS)
            ])  # fmt: skip
            while any(result.end is None for result in results.values()):
                assert client.failure is None, client.failure
                await arrived.wait()
                arrived.clear()
            return client.info.device, results
        finally:
            await host.stop()
            await host.close()


def test_an_engine_serves_on_the_device_that_is_named(dense: Path) -> None:
    if REHEARSED:
        engines, environment = EngineSettings(engine="process"), {}
    else:
        engines, environment = EngineSettings(devices=visible_gpus()[0]), {"CUDA_VISIBLE_DEVICES": visible_gpus()[0]}
    (host,) = choose_hosts(settings(dense, engines), bytes(32))
    assert isinstance(host, ProcessHost)
    assert dict(host.environment) == environment
    if REHEARSED:
        host.launcher = Spawner()  # as on a device
    device, results = asyncio.run(serve(host))
    assert device == DEVICE
    assert all(result.end is not None and result.end.reason is EndReason.LENGTH for result in results.values())
    Oracle.of(dense).check(PROMPTS, list(results.values()), NEAR)
