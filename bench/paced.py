"""An engine without a model, whose steps end on a fixed grid of the machine's clock, to measure what surrounds it.

A token is the number of its step on the grid, modulo `CYCLE`, so a client knows when it was made.

    python -m bench.paced bare               the engine, its outputs dropped
    python -m bench.paced thread             gRPC, frontend and engine in one process
    python -m bench.paced process            gRPC and frontend, the engine in a process behind the link
    python -m bench.paced process 2          two such engines

Each prints a line of JSON with its address and process ids when it is ready, and runs until its input ends.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque

import numpy as np
from grpc import aio
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from model.settings import ModelSettings
from rpc.engines.engine_process import run_engine
from rpc.engines.local import LocalEngine
from rpc.frontend.engine_client import EngineInfo, Reach
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import load_preparer
from rpc.frontend.settings import FrontendSettings
from rpc.link.client import LinkClient
from rpc.observe.metrics import Metrics
from rpc.services.generation import GenerationService
from scheduler.controls import Controls
from scheduler.engine import Sink
from scheduler.events import Logprobs, StepOutputs, Submit
from scheduler.limits import Limits
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, RequestLimits, SchedulerSettings
from scheduler.step import StepPlan, StepResult

PERIOD = 0.02  # seconds of a step
CYCLE = 1500  # below the demo model's vocabulary; 30 s, more than any token's latency
CONTEXT, STREAMS = 100_000, 64


class PacedExecutor:
    """Ends each step on the next point of the grid."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        number = int(time.monotonic() / PERIOD) + 1
        time.sleep(max(0.0, number * PERIOD - time.monotonic()))
        n = len(plan.logits)
        none = np.empty((n, 0))
        logprobs = Logprobs(
            np.zeros(n, np.float32), np.ones(n, np.int32), none.astype(np.int32), none.astype(np.float32)
        )
        return StepResult(plan.step, np.full(n, number % CYCLE, np.int32), logprobs)

    def close(self) -> None:
        pass


def make_engine(sink: Sink) -> LocalEngine:
    layout = KVLayout.uniform(((0,),), 1, 1, 2, 16)
    pages = STREAMS * layout.pages_for(CONTEXT)
    scheduler = Scheduler(SchedulerSettings(), NO_QUEUE_LIMITS, CacheManager(layout, pages, 256))
    limits = Limits(2048, CONTEXT, layout.tokens_in(pages), 256, RequestLimits())
    return LocalEngine(scheduler, PacedExecutor(), EngineInfo(limits, pages, "none", "cpu"), sink)


def bare() -> None:
    def drop(outputs: StepOutputs) -> None:
        pass

    engine = make_engine(drop)
    engine.start()
    request = Request(np.ones(4, np.int32), CONTEXT - 10, (), Controls(0.0, 1.0, 0, 0.0, 0))
    engine.send([Submit(i, request) for i in range(1, STREAMS + 1)])
    print(json.dumps({"engine": os.getpid()}), flush=True)
    sys.stdin.read()
    engine.stop()


async def serve(mode: str, engines: int) -> None:
    frontend = Frontend(load_preparer(ModelSettings()), FrontendSettings(), Metrics("paced"))
    ids = {"frontend": os.getpid()}
    if mode == "thread":
        engine = make_engine(frontend.new_sink())
        engine.start()
        frontend.attach(engine)
        ids["engine"] = os.getpid()
    for number in range(0 if mode == "thread" else engines):
        address = f"unix-abstract:quire-bench-{os.getpid()}-{number}"
        command = [sys.executable, "-m", "bench.paced", "engine", address]
        child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        client = LinkClient(Reach(address), frontend.new_sink(number), RequestLimits(), 10.0)
        await client.connect()
        frontend.attach(client, number)
        ids["engine" if number == 0 else f"engine {number}"] = child.pid
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_GenerationServiceServicer_to_server(GenerationService(frontend), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}", **ids}), flush=True)
    await end_of_input()
    os._exit(0)  # the child's input ends with this process, and so does the child


async def end_of_input() -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    await ended.wait()


async def engine_process(address: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, stop.set)
    await run_engine(make_engine, address, stop)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bare"]:
            bare()
        case ["engine", address]:
            asyncio.run(engine_process(address))
            os._exit(0)
        case [("thread" | "process") as mode, *count]:
            asyncio.run(serve(mode, int(*count or ("1",))))
        case _:
            sys.exit(__doc__)
